"""m3serve, an asynchronous engine for bge-m3; on a CPU it computes in float32 only."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from m3serve import Engine

from benchmarks.adapters import Setting, Vectors, batch_by_length

PACKAGE = "m3serve"
_PATIENCE = 7200.0


class Adapter:
    """Concurrent calls with texts of similar length are one padded batch each."""

    def __init__(self, folder: Path, _precision: str) -> None:
        self._folder = str(folder)
        self._runner = asyncio.Runner()
        self._engine: Engine | None = None

    def encode(self, texts: list[str], setting: Setting) -> Any:
        """Compute all three kinds: (indices of the texts, result) of each call."""
        return self._runner.run(self._encode(texts, setting))

    async def _encode(self, texts: list[str], setting: Setting) -> Any:
        if self._engine is None:
            options = {"max_batch_size": 1, "attn_implementation": "sdpa"}
            self._engine = Engine(self._folder, device="cpu", **options)
            await self._engine.start()
        groups = list(batch_by_length(texts, setting.batch or len(texts)))
        calls = [
            self._engine.embed(
                [texts[index] for index in indices],
                return_sparse=True,
                return_colbert=True,
                timeout=_PATIENCE,
            )
            for indices in groups
        ]
        return list(zip(groups, await asyncio.gather(*calls), strict=True))

    def vectors(self, output: Any) -> Vectors:
        """Convert its lists, in the order of the texts."""
        by_index = {
            index: (result.dense[row], result.colbert_vecs[row])
            for indices, result in output
            for row, index in enumerate(indices)
        }
        dense, colbert = zip(*(by_index[index] for index in sorted(by_index)), strict=True)
        return Vectors(
            dense=np.array(dense, np.float32),
            colbert=np.concatenate([np.array(rows, np.float32) for rows in colbert]),
        )

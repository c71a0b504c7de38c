"""m3serve, an asynchronous engine for bge-m3; on a CPU it computes in float32 only."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from m3serve import Engine

from benchmarks.adapters import Setting, Vectors, by_length

PACKAGE = "m3serve"
_PATIENCE = 7200.0


class Adapter:
    """With its defaults one call is one padded batch and attention is the plain one.

    With a batch size, calls of that many texts of near-equal length are made at once, each a batch
    of its own, with PyTorch's fused attention.
    """

    def __init__(self, folder: Path, _precision: str) -> None:
        self._folder = str(folder)
        self._runner = asyncio.Runner()
        self._engines: dict[bool, Engine] = {}

    def encode(self, texts: list[str], setting: Setting) -> Any:
        """All three kinds as lists: (places of the texts, result) of each call."""
        return self._runner.run(self._encode(texts, setting))

    async def _encode(self, texts: list[str], setting: Setting) -> Any:
        engine = await self._engine(tuned=setting.batch is not None)
        groups = list(by_length(texts, setting.batch or len(texts)))
        calls = [
            engine.embed(
                [texts[place] for place in places],
                return_sparse=True,
                return_colbert=True,
                timeout=_PATIENCE,
            )
            for places in groups
        ]
        return list(zip(groups, await asyncio.gather(*calls), strict=True))

    async def _engine(self, *, tuned: bool) -> Engine:
        if tuned not in self._engines:
            options = {"max_batch_size": 1, "attn_implementation": "sdpa"} if tuned else {}
            self._engines[tuned] = Engine(self._folder, device="cpu", **options)
            await self._engines[tuned].start()
        return self._engines[tuned]

    def vectors(self, answer: Any) -> Vectors:
        """Its lists, put back into the order of the texts."""
        found = {
            place: (result.dense[row], result.colbert_vecs[row])
            for places, result in answer
            for row, place in enumerate(places)
        }
        dense, colbert = zip(*(found[place] for place in sorted(found)), strict=True)
        return Vectors(
            dense=np.array(dense, np.float32),
            colbert=np.concatenate([np.array(one, np.float32) for one in colbert]),
        )

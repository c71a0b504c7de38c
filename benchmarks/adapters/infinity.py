"""infinity-emb: dense vectors only, in its own environment because it needs an older NumPy."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from infinity_emb import AsyncEmbeddingEngine, EngineArgs

from benchmarks.adapters import Setting, Vectors

PACKAGE = "infinity-emb"
_DEFAULT_BATCH = 32


class Adapter:
    """infinity batches texts of similar length itself, up to the given size."""

    def __init__(self, folder: Path, precision: str) -> None:
        self._folder, self._precision = str(folder), precision
        self._runner = asyncio.Runner()
        self._engine: AsyncEmbeddingEngine | None = None
        self._batch = 0

    def encode(self, texts: list[str], setting: Setting) -> Any:
        """Compute dense vectors, a list of arrays."""
        return self._runner.run(self._encode(texts, setting.batch or _DEFAULT_BATCH))

    async def _encode(self, texts: list[str], batch: int) -> Any:
        # The batch size is fixed at its start.
        if self._engine is None or self._batch != batch:
            if self._engine is not None:
                await self._engine.astop()
            arguments = EngineArgs(
                model_name_or_path=self._folder,
                batch_size=batch,
                device="cpu",
                dtype=self._precision,
                engine="torch",
                bettertransformer=False,
                lengths_via_tokenize=True,
                model_warmup=False,
            )
            self._engine, self._batch = AsyncEmbeddingEngine.from_args(arguments), batch
            await self._engine.astart()
        vectors, _ = await self._engine.embed(texts)
        return vectors

    def vectors(self, output: Any) -> Vectors:
        """Convert the list to one array."""
        return Vectors(dense=np.array(output, np.float32))

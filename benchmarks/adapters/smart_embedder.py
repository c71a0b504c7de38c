"""This engine: `EngineCore.embed`, without HTTP."""

import asyncio
import os
from pathlib import Path

import numpy as np

from benchmarks.adapters import Setting, Vectors
from smart_embedder.core import EngineCore
from smart_embedder.requests import EmbedRequest, Outputs
from smart_embedder.results import EmbeddingResult
from smart_embedder.settings import EngineSettings
from smart_embedder.startup import limit_spins, load_models

PACKAGE = "smart-embedder"
# Prefixes of CPU features that are hidden from this engine, by oneDNN's limit.
_HIDDEN = {
    "AVX512_CORE_VNNI": ("amx", "avx10", "avx512_bf16", "avx512_fp16"),
    "AVX2": ("amx", "avx10", "avx512", "avx_vnni"),
}


def hide_instructions() -> None:
    """Let PyTorch report no CPU features beyond ONEDNN_MAX_CPU_ISA."""
    import torch  # noqa: PLC0415 - reads variables that `limit_spins` sets

    hidden = _HIDDEN.get(os.environ.get("ONEDNN_MAX_CPU_ISA", ""), ())
    features = torch.cpu.get_capabilities()
    visible = {name: value for name, value in features.items() if not name.startswith(hidden)}
    torch.cpu.get_capabilities = lambda: visible  # type: ignore[assignment]


class Adapter:
    """All kinds of the model in one call; the engine forms batches itself."""

    def __init__(self, folder: Path, precision: str) -> None:
        limit_spins()
        hide_instructions()
        models = {"embedding_model": str(folder), "reranker_model": "none"}
        settings = EngineSettings.model_validate(models | {"device": "cpu", "dtype": precision})
        self._runner = asyncio.Runner()
        self._engine = EngineCore(settings, load_models)
        self._runner.run(self._engine.start())
        self._kinds = self._runner.run(self._find_kinds())

    async def _find_kinds(self) -> Outputs:
        async with self._engine.lease() as models:
            return models.kinds

    def encode(self, texts: list[str], _setting: Setting) -> EmbeddingResult:
        """Compute all kinds of vectors that the model makes."""
        return self._runner.run(self._engine.embed(EmbedRequest(texts, self._kinds)))

    def vectors(self, output: EmbeddingResult) -> Vectors:
        """Join the arrays of the texts."""
        return Vectors(
            dense=np.stack([e.dense for e in output.embeddings if e.dense is not None]),
            colbert=np.concatenate([e.colbert for e in output.embeddings if e.colbert is not None])
            if self._kinds.colbert
            else None,
        )

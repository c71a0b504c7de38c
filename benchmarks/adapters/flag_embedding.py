"""FlagEmbedding, the reference implementation of bge-m3: float32 on a CPU, float16 on a GPU."""

from pathlib import Path
from typing import Any

import numpy as np
from FlagEmbedding import BGEM3FlagModel

from benchmarks.adapters import Setting, Vectors

PACKAGE = "FlagEmbedding"
_DEFAULT_BATCH = 256


class Adapter:
    """FlagEmbedding sorts by length itself, pads each batch, and runs the longest batch twice."""

    def __init__(self, folder: Path, _precision: str, device: str = "cpu") -> None:
        self._model = BGEM3FlagModel(str(folder), use_fp16=device != "cpu", devices=device)

    def encode(self, texts: list[str], setting: Setting, *, every_kind: bool = True) -> Any:
        """Compute dense vectors and, with `every_kind`, sparse and ColBERT ones."""
        return self._model.encode(
            texts,
            batch_size=setting.batch or _DEFAULT_BATCH,
            max_length=8192,
            return_dense=True,
            return_sparse=every_kind,
            return_colbert_vecs=every_kind,
        )

    def vectors(self, output: Any) -> Vectors:
        """Convert its dictionary of arrays."""
        return Vectors(
            dense=np.asarray(output["dense_vecs"], np.float32),
            colbert=np.concatenate(output["colbert_vecs"]).astype(np.float32),
        )

"""sentence-transformers: dense vectors only."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from benchmarks.adapters import Setting, Vectors

PACKAGE = "sentence-transformers"
_DEFAULT_BATCH = 32


class Adapter:
    """It sorts by length itself and pads each batch; the pooling is what its folder names."""

    def __init__(self, folder: Path, precision: str) -> None:
        self._model = SentenceTransformer(
            str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, precision)}
        )

    def encode(self, texts: list[str], setting: Setting) -> Any:
        """Dense vectors [N, width]; as a tensor, because NumPy has no bfloat16."""
        batch = setting.batch or _DEFAULT_BATCH
        return self._model.encode(
            texts, batch_size=batch, show_progress_bar=False, convert_to_tensor=True
        )

    def vectors(self, answer: Any) -> Vectors:
        """In float32, made unit length again: bfloat16 rounds a norm too."""
        dense = answer.float().numpy()
        return Vectors(dense=dense / np.linalg.norm(dense, axis=1, keepdims=True))

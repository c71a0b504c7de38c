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
    """sentence-transformers sorts by length itself and pads each batch."""

    def __init__(self, folder: Path, precision: str) -> None:
        self._model = SentenceTransformer(
            str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, precision)}
        )

    def encode(self, texts: list[str], setting: Setting) -> Any:
        """Compute dense vectors [N, width], as a tensor because NumPy has no bfloat16."""
        batch = setting.batch or _DEFAULT_BATCH
        return self._model.encode(
            texts, batch_size=batch, show_progress_bar=False, convert_to_tensor=True
        )

    def vectors(self, output: Any) -> Vectors:
        """Convert to float32 and normalise again, because bfloat16 rounds the norm, too."""
        dense = output.float().numpy()
        return Vectors(dense=dense / np.linalg.norm(dense, axis=1, keepdims=True))

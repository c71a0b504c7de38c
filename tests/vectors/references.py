"""FastEmbed's MUVERA, PyLate's pooling and models, which an environment of their own runs.

Neither installs beside the service: FastEmbed wants an older huggingface-hub, PyLate older versions
of transformers and sentence-transformers. scripts/check_references.sh makes that environment.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.support.answering_process import AnsweringProcess, answering_process
from tests.support.server import REPOSITORY

ENVIRONMENT = REPOSITORY / ".venv-references"
MISSING = "scripts/check_references.sh makes the references' environment"


class References:
    """The packages' own functions."""

    def __init__(self, process: AnsweringProcess) -> None:
        self._process = process

    def muvera(self, vectors: np.ndarray, side: str) -> np.ndarray:
        """FastEmbed's encoding."""
        return self._ask("muvera", vectors=vectors.tolist(), side=side)

    def pool(self, vectors: np.ndarray, factor: int) -> np.ndarray:
        """PyLate's means of clusters, scaled to unit length."""
        means = self._ask("pooled", vectors=vectors.tolist(), factor=factor)
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    def embed(self, folder: Path, texts: list[str], side: str) -> list[np.ndarray]:
        """The vectors that PyLate makes of each text with the model in `folder`."""
        made = self._process.ask(of="colbert", folder=str(folder), texts=texts, side=side)
        return [np.array(vectors, np.float32) for vectors in made]

    def _ask(self, of: str, **question: object) -> np.ndarray:
        return np.array(self._process.ask(of=of, **question), np.float32)


@contextmanager
def run_references() -> Iterator[References]:
    """Start their process; end it when the block ends."""
    script = Path(__file__).with_name("run_references.py")
    with answering_process([str(ENVIRONMENT / "bin" / "python"), str(script)]) as process:
        yield References(process)

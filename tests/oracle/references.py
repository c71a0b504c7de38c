"""Runs FastEmbed's MUVERA and PyLate's pooling and models in an environment of their own.

Neither installs beside the service: FastEmbed needs an older huggingface-hub, PyLate older versions
of transformers and sentence-transformers. scripts/check_references.sh makes that environment.
references.json has some of their results, for machines without it; this module records them:

    python -m tests.oracle.references
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.smart_embedder.test_vectors import FACTORS, RECORDED, SHAPES, STEP, vectors_of
from tests.support.answering_process import AnsweringProcess, answering_process
from tests.support.server import REPOSITORY

ENVIRONMENT = REPOSITORY / ".venv-references"
MISSING = "scripts/check_references.sh makes the references' environment"


class References:
    """The functions of the packages."""

    def __init__(self, process: AnsweringProcess) -> None:
        self._process = process

    def muvera(self, vectors: np.ndarray, side: str) -> np.ndarray:
        """Encode vectors with FastEmbed."""
        return self._ask("muvera", vectors=vectors.tolist(), side=side)

    def pool(self, vectors: np.ndarray, factor: int) -> np.ndarray:
        """Pool vectors with PyLate, and scale the means to unit length."""
        means = self._ask("pooled", vectors=vectors.tolist(), factor=factor)
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    def embed(self, folder: Path, texts: list[str], side: str) -> list[np.ndarray]:
        """Embed texts with PyLate and the model in `folder`."""
        embedded = self._process.ask(of="colbert", folder=str(folder), texts=texts, side=side)
        return [np.array(vectors, np.float32) for vectors in embedded]

    def _ask(self, of: str, **question: object) -> np.ndarray:
        return np.array(self._process.ask(of=of, **question), np.float32)


@contextmanager
def run_references() -> Iterator[References]:
    """Run the process of the packages until the block ends."""
    script = Path(__file__).with_name("run_references.py")
    with answering_process([str(ENVIRONMENT / "bin" / "python"), str(script)]) as process:
        yield References(process)


def record() -> None:
    muvera, pooled = {}, {}
    with run_references() as references:
        for tokens, width in SHAPES:
            vectors = vectors_of(tokens, width)
            muvera[f"{tokens}x{width}"] = {
                side: references.muvera(vectors, side)[::STEP].round(7).tolist()
                for side in ("query", "document")
            }
        for factor in FACTORS:
            pooled[str(factor)] = references.pool(vectors_of(70, 48), factor).round(7).tolist()
    RECORDED.write_text(json.dumps({"muvera": muvera, "pooled": pooled}))


if __name__ == "__main__":
    record()

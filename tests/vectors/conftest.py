"""What the libraries that are followed here make of some vectors."""

import numpy as np
import pytest

from smart_embedder.vectors import muvera_of, pool
from tests.vectors.references import ENVIRONMENT, MISSING, run_references


class OwnFunctions:
    """`References` by our own functions, which the other tests here compare with the packages."""

    def muvera(self, vectors: np.ndarray, side: str) -> np.ndarray:
        return muvera_of(vectors.shape[1]).encode(vectors, side)

    def pool(self, vectors: np.ndarray, factor: int) -> np.ndarray:
        return pool(vectors, factor)


@pytest.fixture(scope="session")
def references():
    """The packages themselves."""
    if not ENVIRONMENT.is_dir():
        pytest.skip(MISSING)
    with run_references() as running:
        yield running


@pytest.fixture(scope="session")
def expected(request: pytest.FixtureRequest):
    """What makes the vectors that are expected: the packages where they are installed."""
    return request.getfixturevalue("references") if ENVIRONMENT.is_dir() else OwnFunctions()

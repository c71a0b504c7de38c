"""Loads embedders of small checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smart_embedder.models.loader import load_embedder
from tests.support.encoders import float32


@pytest.fixture(scope="session")
def load() -> Callable[[Path], Any]:
    """Load the embedder in a folder."""
    return lambda folder: load_embedder("tiny", folder, 8192, float32())

"""Loads embedders of small checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smart_embedder.kernels.target import Target
from smart_embedder.models.loader import load_embedder


@pytest.fixture(scope="session")
def load(float32_target: Target) -> Callable[[Path], Any]:
    """Load the embedder in a folder."""
    return lambda folder: load_embedder("tiny", folder, 8192, float32_target)

"""A loaded model for the tests of this room."""

from pathlib import Path

import pytest
import torch

from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.embedders import M3Embedder

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def float32_target() -> Target:
    return Target(CPU, torch.float32, choose_backend(CPU, torch.float32))


@pytest.fixture(scope="session")
def embedder(tiny_m3: Path, float32_target: Target) -> M3Embedder:
    return M3Embedder("tiny-m3", tiny_m3, 8192, float32_target)

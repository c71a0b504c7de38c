"""The engine's own numbers, to compare a server's answers with."""

from pathlib import Path

import pytest
import torch

from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.dense import M3Embedder, load_m3_embedder


@pytest.fixture(scope="session")
def embedder(tiny_m3: Path) -> M3Embedder:
    cpu = torch.device("cpu")
    target = Target(cpu, torch.float32, choose_backend(cpu, torch.float32))
    return load_m3_embedder("tiny-m3", tiny_m3, 8192, target)

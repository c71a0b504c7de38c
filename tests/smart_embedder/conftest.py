"""A clock that tests move, and a loaded model."""

import time
from pathlib import Path

import pytest
import torch

from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models.heads.m3 import M3Embedder

CPU = torch.device("cpu")


class Ticking:
    """A clock that a test moves."""

    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    """Replaces the clock that measures seconds."""
    clock = Ticking()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture(scope="session")
def embedder(tiny_m3: Path) -> M3Embedder:
    target = Target(CPU, torch.float32, choose_backend(CPU, torch.float32))
    return M3Embedder("tiny-m3", tiny_m3, 8192, target)

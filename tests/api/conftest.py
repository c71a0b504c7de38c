"""A client, its answers, and the engine's own numbers, to compare these with."""

from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.dense import M3Embedder
from tests.support.server import RunningServer


@pytest.fixture(scope="session")
def embedder(tiny_m3: Path) -> M3Embedder:
    cpu = torch.device("cpu")
    target = Target(cpu, torch.float32, choose_backend(cpu, torch.float32))
    return M3Embedder("tiny-m3", tiny_m3, 8192, target)


@pytest.fixture(scope="module")
def client(server: RunningServer):
    """Of a server without a token, whose only model is bge-m3's kind."""
    with server.client() as client:
        yield client


def answered(client: httpx2.Client, path: str, **body: Any) -> Any:
    """The answer to a body that must be answered."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()

"""Workers that share the cores: bound to their own, equal in their answers, one model for both."""

import asyncio
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from smart_embedder.engine import Engine
from smart_embedder.models.device.cpu import available_threads
from smart_embedder.models.load import load_models
from smart_embedder.settings import Settings
from tests.support.checkpoints import plain_corpus

pytestmark = pytest.mark.skipif(available_threads() < 2, reason="one core cannot be shared")
SECOND_NODE = Path("/sys/devices/system/node/node1").exists()
TEXTS = [" ".join(plain_corpus(lines=5))[: 20 * length] for length in range(1, 33)]


def settings(folder: Path, device: str) -> Settings:
    return Settings(
        embedding_model=str(folder),
        reranker_model="late-interaction",
        device=device,
        dtype="float32",
        max_batch_tokens=64,
    )


async def embed(engine: Engine) -> list:
    """Every text as a request of its own, all at once."""
    results = await asyncio.gather(*(engine.embed([text]) for text in TEXTS))
    return [result.embeddings[0] for result in results]


async def test_two_workers_answer_as_one_does_on_cores_of_their_own(tiny_m3: Path) -> None:
    async with Engine(settings(tiny_m3, "cpu"), load_models) as engine:
        expected = await embed(engine)
    async with Engine(settings(tiny_m3, "cpu:0,cpu:1"), load_models) as engine:
        found = await embed(engine)
        models = engine.loaded()
        assert models is not None
        assert [device.name for device in models.devices] == ["cpu:0", "cpu:1"]
        assert models.device.description.endswith("threads, shared by 2 workers")
        # On one memory node the weights are there once.
        if not SECOND_NODE:
            assert models.replicas[0].embedder is models.embedder
        if sys.platform == "linux":
            require_own_cores()
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one.dense, other.dense, atol=1e-6)
        np.testing.assert_allclose(one.colbert, other.colbert, atol=1e-6)
        np.testing.assert_array_equal(one.sparse.indices, other.sparse.indices)


def require_own_cores() -> None:
    """The threads of the workers share no CPU."""
    bound = [
        os.sched_getaffinity(thread.native_id)
        for thread in threading.enumerate()
        if thread.name in {"device", "device-1"} and thread.native_id is not None
    ]
    assert len(bound) == 2
    assert not bound[0] & bound[1]
    assert bound[0] | bound[1] == os.sched_getaffinity(0)

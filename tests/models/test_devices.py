"""Models on every kind of device that this machine has, against a CPU in float32.

`scripts/gpu_report.sh` runs them on a GPU: by kernels and graphs, from the threads of an engine.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smart_embedder.engine.records import Outputs, TextEmbedding, TokenIds
from smart_embedder.models.device.choose import choose_dtype, ensure_allocates
from smart_embedder.models.families.backbone import Target
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.tasks.base import DeviceModel
from smart_embedder.models.tasks.load import load_embedder

pytestmark = pytest.mark.device
HAS_MPS = torch.backends.mps.is_available()
GPUS = [*["cuda"] * torch.cuda.is_available(), *["mps"] * HAS_MPS]
CASES = [("cpu", "tiny_m3"), ("cpu", "tiny_qwen")]
CASES += list(product(GPUS, ("tiny_m3", "demo_checkpoint", "tiny_qwen")))
EVERY = Outputs(dense=True, sparse=True, colbert=True)
# Of unit vectors of 64 numbers, after two layers in half precision.
CLOSE = 0.03


def target(device: torch.device, *, qwen: bool) -> Target:
    ensure_allocates(device)
    dtype = choose_dtype("auto", device, qwen=qwen)
    return Target(device, dtype, choose_backend(device, dtype))


def batches() -> list[list[TokenIds]]:
    """Of a query, of many lengths, of one long text beside short ones, and a query again."""
    drawn = np.random.default_rng(0)
    lengths = [7], range(1, 90), [*[5] * 300, 400, 5], [9, 3]
    return [[drawn.integers(5, 100, each) for each in those] for those in lengths]


def in_flight(model: DeviceModel[Any], made: Sequence[Sequence[TokenIds]]) -> list[list[Any]]:
    """Launched on one thread and collected on another, two batches at a time."""
    with ThreadPoolExecutor(1) as launching, ThreadPoolExecutor(1) as collecting:

        def launch(batch: Sequence[TokenIds]) -> Callable[[], list[Any]]:
            return launching.submit(model.launch, list(batch), [EVERY] * len(batch)).result()

        waiting = [collecting.submit(launch(batch)) for batch in made]
        return [each.result() for each in waiting]


def check(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    for mine, other in zip(actual, expected, strict=True):
        assert isinstance(mine, TextEmbedding)
        # Dense vectors are scaled to unit length after the models.
        length = np.linalg.norm(other.dense)
        np.testing.assert_allclose(mine.dense / length, other.dense / length, atol=CLOSE)
        if other.colbert is not None:
            np.testing.assert_allclose(mine.colbert, other.colbert, atol=CLOSE)
        if other.sparse is not None:
            weights = dict(zip(mine.sparse.indices.tolist(), mine.sparse.values, strict=True))
            found = [weights.get(index, 0.0) for index in other.sparse.indices.tolist()]
            np.testing.assert_allclose(found, other.sparse.values, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(("device", "checkpoint"), CASES)
def test_vectors_are_those_of_a_cpu_in_float32(
    device: str, checkpoint: str, request: pytest.FixtureRequest, float32_target: Target
) -> None:
    folder: Path = request.getfixturevalue(checkpoint)
    qwen = checkpoint == "tiny_qwen"
    model = load_embedder("m", folder, 512, target(torch.device(device), qwen=qwen))
    model.capture_graphs()
    assert not model.info.refused
    reference = load_embedder("m", folder, 512, float32_target)
    made = batches()
    for actual, batch in zip(in_flight(model, made), made, strict=True):
        check(actual, reference.forward(batch, EVERY))

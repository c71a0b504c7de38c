"""Models on every kind of device that this machine has, against a CPU in float32.

`scripts/gpu_report.sh` runs them on a GPU: by kernels and graphs, from the threads of an engine.
`pytest -m device` runs what needs a real device to be shown.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice, product
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from smart_embedder.engine.records import Outputs, TextEmbedding, TokenIds
from smart_embedder.models.device.choose import choose_dtype, ensure_allocates, has_float8
from smart_embedder.models.loader import load_embedder, load_reranker
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.cuda import load_kernels
from smart_embedder.models.ops.proof import Target

pytestmark = pytest.mark.device
DEVICES = ["cpu"]
DEVICES += ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
MODELS = {
    "tiny_m3": load_embedder,
    "demo_checkpoint": load_embedder,
    "tiny_qwen": load_embedder,
    "tiny_reranker": load_reranker,
    "tiny_qwen, reranking": load_reranker,
}
KINDS = [Outputs(*each) for each in product((True, False), repeat=3) if any(each)]
# Of unit vectors of 64 numbers, after two layers in half precision.
CLOSE = 0.03


def batches() -> list[list[TokenIds]]:
    """A query, many lengths, a long text beside short ones, shared beginnings, a query again."""
    drawn = np.random.default_rng(0)
    lengths = [7], range(1, 90), [*[5] * 100, 400, 5], [9, 3]
    made = [[drawn.integers(5, 100, each) for each in those] for those in lengths]
    begin = drawn.integers(5, 90, 9)
    made.insert(3, [np.append(begin, drawn.integers(5, 90, each)) for each in (3, 17, 17, 60)])
    return made


def in_flight(model: Any, made: Sequence[list[TokenIds]]) -> list[list[Any]]:
    """Launched on one thread and collected on another, two batches at a time."""
    with ThreadPoolExecutor(1) as launching, ThreadPoolExecutor(1) as collecting:

        def launch(batch: list[TokenIds]) -> Callable[[], list[Any]]:
            kinds = list(islice(cycle(KINDS), len(batch)))
            return launching.submit(model.launch, batch, kinds).result()

        waiting = [collecting.submit(launch(batch)) for batch in made]
        return [each.result() for each in waiting]


def check(mine: Any, other: Any) -> None:
    if not isinstance(other, TextEmbedding):  # A logit has no unit length.
        np.testing.assert_allclose(mine, other, rtol=0.05, atol=0.05)
        return
    if other.dense is not None:
        # Dense vectors are scaled to unit length after the models.
        length = np.linalg.norm(other.dense)
        np.testing.assert_allclose(mine.dense / length, other.dense / length, atol=CLOSE)
    if other.colbert is not None:
        np.testing.assert_allclose(mine.colbert, other.colbert, atol=CLOSE)
    if other.sparse is not None:
        weights = dict(zip(mine.sparse.indices.tolist(), mine.sparse.values, strict=True))
        found = [weights.get(index, 0.0) for index in other.sparse.indices.tolist()]
        np.testing.assert_allclose(found, other.sparse.values, rtol=CLOSE, atol=CLOSE)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs an NVIDIA GPU")
def test_kernels_are_loaded_in_a_thread_that_has_not_used_the_device() -> None:
    """As of a model that is loaded while others run, where PyTorch has memory to give."""
    torch.empty(1, device="cuda")
    load_kernels.cache_clear()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(load_kernels, torch.device("cuda"), torch.float16).result() is not None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", DEVICES)
def test_results_are_those_of_a_cpu_in_float32_and_of_lonely_texts(
    device: str, name: str, request: pytest.FixtureRequest, float32_target: Target
) -> None:
    folder = request.getfixturevalue(name.partition(",")[0])
    where = torch.device(device)
    ensure_allocates(where)
    dtype = choose_dtype("auto", where, qwen="qwen" in name)
    target = Target(where, dtype, choose_backend(where, dtype))
    options = {"max_qwen_pairs": 16} if MODELS[name] is load_reranker else {}
    model, exact = (
        MODELS[name]("m", folder, 512, each, **options) for each in (target, float32_target)
    )
    model.capture_graphs()
    assert not model.info.refused
    made = batches()
    for results, batch in zip(in_flight(model, made), made, strict=True):
        for mine, ids, kinds in zip(results, batch, cycle(KINDS), strict=False):
            (other,) = exact.forward([ids], kinds)
            check(mine, other)


@pytest.mark.parametrize("device", [each for each in DEVICES if has_float8(torch.device(each))])
@pytest.mark.parametrize("name", ["tiny_m3", "tiny_qwen"])
def test_vectors_in_float8_are_nearly_those_in_float32(
    name: str, device: str, float32_target: Target, request: pytest.FixtureRequest
) -> None:
    folder, where = request.getfixturevalue(name), torch.device(device)
    ensure_allocates(where)
    dtype = choose_dtype("float8", where)
    target = Target(where, dtype, choose_backend(where, dtype), float8=True)
    model, exact = (load_embedder("m", folder, 512, each) for each in (target, float32_target))
    model.capture_graphs()
    assert not model.info.refused
    for batch in batches():
        mine, other = (each.forward(batch, Outputs(dense=True)) for each in (model, exact))
        vectors = (torch.from_numpy(np.stack([e.dense for e in each])) for each in (mine, other))
        assert functional.cosine_similarity(*vectors).min() > 0.98

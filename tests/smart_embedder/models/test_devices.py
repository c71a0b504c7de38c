"""Models on the devices of this machine, compared with a CPU, and on simulated devices.

`pytest -m device` selects the tests for real devices, which `scripts/gpu_report.sh` runs on a GPU.
Simulated devices compute no numbers: they show that a forward does not synchronize, and that no
operator is missing.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import ModernBertModel

from smart_embedder.hardware.device import choose_dtype, ensure_allocates, has_float8
from smart_embedder.kernels.cuda import load_kernels
from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models.loader import load_embedder, load_reranker
from smart_embedder.requests import Outputs
from smart_embedder.results import TextEmbedding
from smart_embedder.tokens import TokenIds
from tests.support.checkpoints import save_m3
from tests.support.encoders import float32
from tests.support.simulated_cuda import simulated_cuda
from tests.support.simulated_mps import simulated_mps
from tests.support.wordpiece import MODERNBERT, save_colbert

CUDA, MPS = torch.device("cuda:0"), torch.device("mps:0")
DEVICES = ["cpu"]
DEVICES += ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
MODELS = {
    "tiny_m3": load_embedder,
    "demo_checkpoint": load_embedder,
    "tiny_qwen": load_embedder,
    "tiny_reranker": load_reranker,
    "tiny_qwen, reranking": load_reranker,
}
KINDS = [Outputs(*flags) for flags in product((True, False), repeat=3) if any(flags)]
# The tolerance for unit vectors of 64 numbers, after two layers in half precision.
CLOSE = 0.03


def load_on(device: torch.device, name: str, folder: Path) -> Any:
    """Load a model in the number format that `auto` chooses on the device."""
    dtype = choose_dtype("auto", device, qwen="qwen" in name)
    return load(name, folder, Target(device, dtype, choose_backend(device, dtype)))


def load(name: str, folder: Path, target: Target) -> Any:
    options = {"max_pairs": 16} if MODELS[name] is load_reranker else {}
    return MODELS[name]("m", folder, 512, target, **options)


def batches() -> list[list[TokenIds]]:
    """A query, many lengths, a long text beside short ones, shared prefixes, two queries."""
    random = np.random.default_rng(0)
    sizes = [7], range(1, 90, 6), [*[5] * 20, 400, 5], [9, 3]
    drawn = [[random.integers(5, 100, length) for length in lengths] for lengths in sizes]
    prefix = random.integers(5, 90, 9)
    shared = [np.append(prefix, random.integers(5, 90, length)) for length in (3, 17, 17, 60)]
    drawn.insert(3, shared)
    return drawn


def run_in_flight(model: Any, batches: Sequence[list[TokenIds]]) -> list[list[Any]]:
    """Launch on one thread and collect on another, two batches at a time."""
    with ThreadPoolExecutor(1) as launching, ThreadPoolExecutor(1) as collecting:

        def launch(batch: list[TokenIds]) -> Callable[[], list[Any]]:
            kinds = list(islice(cycle(KINDS), len(batch)))
            return launching.submit(model.launch, batch, kinds).result()

        futures = [collecting.submit(launch(batch)) for batch in batches]
        return [future.result() for future in futures]


def assert_close(actual: Any, expected: Any) -> None:
    if not isinstance(expected, TextEmbedding):  # A logit has no unit length.
        np.testing.assert_allclose(actual, expected, rtol=0.05, atol=0.05)
        return
    if expected.dense is not None:
        # Dense vectors are scaled to unit length after the models.
        length = np.linalg.norm(expected.dense)
        np.testing.assert_allclose(actual.dense / length, expected.dense / length, atol=CLOSE)
    if expected.colbert is not None:
        np.testing.assert_allclose(actual.colbert, expected.colbert, atol=CLOSE)
    if expected.sparse is not None:
        weights = dict(zip(actual.sparse.indices.tolist(), actual.sparse.values, strict=True))
        found = [weights.get(index, 0.0) for index in expected.sparse.indices.tolist()]
        np.testing.assert_allclose(found, expected.sparse.values, rtol=CLOSE, atol=CLOSE)


@pytest.mark.device
@pytest.mark.skipif("cuda" not in DEVICES, reason="needs an NVIDIA GPU")
def test_cuda_kernels_load_in_a_thread_new_to_the_device() -> None:
    """As for a model that is loaded while others run, when PyTorch has allocated memory."""
    torch.empty(1, device="cuda")
    load_kernels.cache_clear()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(load_kernels, torch.device("cuda"), torch.float16).result() is not None


@pytest.mark.device
@pytest.mark.parametrize(
    ("device", "name"),
    [case for case in product(DEVICES, MODELS) if case != ("cpu", "demo_checkpoint")],
)
def test_device_results_equal_the_cpu_in_float32_and_single_texts(
    device: str, name: str, request: pytest.FixtureRequest
) -> None:
    folder, where = request.getfixturevalue(name.partition(",")[0]), torch.device(device)
    ensure_allocates(where)
    model, exact = load_on(where, name, folder), load(name, folder, float32())
    model.capture_graphs()
    assert not model.info.refused
    for results, batch in zip(run_in_flight(model, batches()), batches(), strict=True):
        for actual, ids, kinds in zip(results, batch, cycle(KINDS), strict=False):
            (expected,) = exact.forward([ids], kinds)
            assert_close(actual, expected)


@pytest.mark.device
@pytest.mark.parametrize(
    "device", [device for device in DEVICES if has_float8(torch.device(device))]
)
@pytest.mark.parametrize("name", ["tiny_m3", "tiny_qwen"])
def test_float8_vectors_are_close_to_float32(
    name: str, device: str, request: pytest.FixtureRequest
) -> None:
    folder, where = request.getfixturevalue(name), torch.device(device)
    ensure_allocates(where)
    dtype = choose_dtype("float8", where)
    target = Target(where, dtype, choose_backend(where, dtype), float8=True)
    model, exact = load(name, folder, target), load(name, folder, float32())
    model.capture_graphs()
    assert not model.info.refused
    for batch in batches():
        vectors = [
            torch.from_numpy(np.stack([result.dense for result in results]))
            for results in (
                model.forward(batch, Outputs(dense=True)),
                exact.forward(batch, Outputs(dense=True)),
            )
        ]
        assert functional.cosine_similarity(*vectors).min() > 0.98


def launch_checked(model: Any, sequences: list[TokenIds]) -> Callable[[], None]:
    """Launch a batch, and return a function that collects and checks its results."""
    collect = model.launch(sequences, list(islice(cycle(KINDS), len(sequences))))

    def collect_checked() -> None:
        results = collect()
        assert len(results) == len(sequences)
        assert not any(isinstance(result, Exception) for result in results)

    return collect_checked


@pytest.mark.parametrize("name", ["tiny_m3", "tiny_qwen, reranking"])
def test_mps_has_every_operator_of_a_forward(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name.partition(",")[0])
    with simulated_mps() as device:
        model = load_on(MPS, name, folder)
        launch_checked(model, batches()[2])()
    assert not model.info.refused
    assert device.called


def launches_of(
    name: str, folder: Path, capability: tuple[int, int] = (9, 0), texts: Sequence[str] = ()
) -> Counter[str]:
    """Count the launches of a forward of `texts`, or of the third batch; it may not synchronize."""
    with simulated_cuda(capability) as cuda:
        model = load_on(CUDA, name, folder)
        sequences = batches()[2]
        if texts:
            sequences = [text.ids for text in model.tokenize(texts, input_type="query")]
        with cuda.forward() as launches:
            collect = launch_checked(model, sequences)
    collect()
    return launches


@pytest.mark.parametrize(
    ("name", "capability"),
    [("tiny_m3", (12, 0)), ("tiny_qwen", (7, 5)), ("tiny_qwen, reranking", (12, 0))],
)
def test_cuda_forward_does_not_synchronize(
    name: str, capability: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    launches = launches_of(name, request.getfixturevalue(name.partition(",")[0]), capability)
    flash = capability >= (8, 0)
    assert launches["_flash_attention_forward"] == 2 * flash
    assert launches["_efficient_attention_forward"] == 2 * (not flash)


def test_cuda_mean_pooling_does_not_synchronize(tiny_m3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_m3, tmp_path / "mean")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert launches_of("tiny_m3", folder)["segment_reduce"] == 1


def test_cuda_colbert_query_expansion_does_not_synchronize(tmp_path: Path) -> None:
    folder = save_colbert(tmp_path / "model", ModernBertModel, **MODERNBERT)
    launches = launches_of("tiny_m3", folder, texts=["search", "rank " * 90])
    assert launches["_flash_attention_forward"] == 2  # Once in each layer, window or not.


def test_cuda_forward_is_8_launches_for_each_layer_and_8_more(tmp_path: Path) -> None:
    launches = launches_of("tiny_m3", save_m3(tmp_path / "m3", layers=4))
    assert (launches["add_norm"], launches["embed"]) == (2 * 4, 1)
    assert 8 * 4 < launches.total() <= 8 * 4 + 8

"""Models on every kind of device: on this machine's, against a CPU, and on simulated ones.

`scripts/gpu_report.sh` runs the first on a GPU: by kernels and graphs, from the threads of an
engine. `pytest -m device` runs what needs a real device to be shown. On simulated ones nothing
waits within a forward, and no operator is missing; their numbers are not computed.
"""

import shutil
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
KINDS = [Outputs(*each) for each in product((True, False), repeat=3) if any(each)]
# The demo is of full size: simulated devices compute the mean of bge-m3's kind instead.
SIMULATED = [name for name in MODELS if name != "demo_checkpoint"]
# Of unit vectors of 64 numbers, after two layers in half precision.
CLOSE = 0.03


def load_on(device: torch.device, name: str, folder: Path) -> Any:
    """In the format that is chosen for the model there."""
    dtype = choose_dtype("auto", device, qwen="qwen" in name)
    return load(name, folder, Target(device, dtype, choose_backend(device, dtype)))


def load(name: str, folder: Path, target: Target) -> Any:
    options = {"max_qwen_pairs": 16} if MODELS[name] is load_reranker else {}
    return MODELS[name]("m", folder, 512, target, **options)


def batches() -> list[list[TokenIds]]:
    """A query, many lengths, a long text beside short ones, shared beginnings, a query again."""
    drawn = np.random.default_rng(0)
    lengths = [7], range(1, 90, 6), [*[5] * 20, 400, 5], [9, 3]
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


@pytest.mark.device
@pytest.mark.skipif("cuda" not in DEVICES, reason="needs an NVIDIA GPU")
def test_kernels_are_loaded_in_a_thread_that_has_not_used_the_device() -> None:
    """As of a model that is loaded while others run, where PyTorch has memory to give."""
    torch.empty(1, device="cuda")
    load_kernels.cache_clear()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(load_kernels, torch.device("cuda"), torch.float16).result() is not None


@pytest.mark.device
@pytest.mark.parametrize(
    ("device", "name"),
    [each for each in product(DEVICES, MODELS) if each != ("cpu", "demo_checkpoint")],
)
def test_results_are_those_of_a_cpu_in_float32_and_of_lonely_texts(
    device: str, name: str, request: pytest.FixtureRequest, float32_target: Target
) -> None:
    folder, where = request.getfixturevalue(name.partition(",")[0]), torch.device(device)
    ensure_allocates(where)
    model, exact = load_on(where, name, folder), load(name, folder, float32_target)
    model.capture_graphs()
    assert not model.info.refused
    made = batches()
    for results, batch in zip(in_flight(model, made), made, strict=True):
        for mine, ids, kinds in zip(results, batch, cycle(KINDS), strict=False):
            (other,) = exact.forward([ids], kinds)
            check(mine, other)


@pytest.mark.device
@pytest.mark.parametrize("device", [each for each in DEVICES if has_float8(torch.device(each))])
@pytest.mark.parametrize("name", ["tiny_m3", "tiny_qwen"])
def test_vectors_in_float8_are_nearly_those_in_float32(
    name: str, device: str, float32_target: Target, request: pytest.FixtureRequest
) -> None:
    folder, where = request.getfixturevalue(name), torch.device(device)
    ensure_allocates(where)
    dtype = choose_dtype("float8", where)
    target = Target(where, dtype, choose_backend(where, dtype), float8=True)
    model, exact = (load(name, folder, each) for each in (target, float32_target))
    model.capture_graphs()
    assert not model.info.refused
    for batch in batches():
        mine, other = (each.forward(batch, Outputs(dense=True)) for each in (model, exact))
        vectors = (torch.from_numpy(np.stack([e.dense for e in each])) for each in (mine, other))
        assert functional.cosine_similarity(*vectors).min() > 0.98


def collected(model: Any, sequences: list[TokenIds]) -> Callable[[], list[Any]]:
    """Launch them; what is returned collects and looks at the results."""
    collect = model.launch(sequences, list(islice(cycle(KINDS), len(sequences))))

    def look() -> list[Any]:
        results = collect()
        assert len(results) == len(sequences)
        assert not any(isinstance(each, Exception) for each in results)
        return results

    return look


@pytest.mark.parametrize("name", SIMULATED)
def test_a_model_answers_by_operators_that_apples_gpus_have(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name.partition(",")[0])
    with simulated_mps() as device:
        model = load_on(MPS, name, folder)
        collected(model, batches()[2])()
    assert not model.info.refused
    assert device.called


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("capability", [(7, 5), (12, 0)])
def test_on_cuda_a_forward_waits_for_nothing(
    name: str, capability: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name.partition(",")[0])
    with simulated_cuda(capability) as cuda:
        model = load_on(CUDA, name, folder)
        with cuda.forward() as launches:
            look = collected(model, batches()[2])
    look()
    flash = capability >= (8, 0)
    assert launches["_flash_attention_forward"] == 2 * flash
    assert launches["_efficient_attention_forward"] == 2 * (not flash)


def test_on_cuda_the_mean_of_a_text_is_not_waited_for(tiny_m3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_m3, tmp_path / "mean")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with simulated_cuda() as cuda:
        model = load_on(CUDA, "tiny_m3", folder)
        with cuda.forward() as launches:
            look = collected(model, batches()[2])
    look()
    assert launches["segment_reduce"] == 1


def test_on_cuda_queries_of_another_family_that_are_filled_up_wait_for_nothing(
    tmp_path: Path,
) -> None:
    folder = save_colbert(tmp_path / "model", ModernBertModel, **MODERNBERT)
    with simulated_cuda() as cuda:
        dtype = choose_dtype("auto", CUDA, qwen=True)
        target = Target(CUDA, dtype, choose_backend(CUDA, dtype))
        model = load_embedder("colbert", folder, 512, target)
        texts = model.tokenize(["search", "rank " * 90], input_type="query")
        with cuda.forward() as launches:
            look = collected(model, [text.ids for text in texts])
    look()
    assert launches["_flash_attention_forward"] == 2  # Once in each layer, window or not.


def test_on_cuda_a_forward_of_as_many_layers_as_bge_m3_has_is_at_most_200_launches(
    tmp_path: Path,
) -> None:
    folder, sequences = save_m3(tmp_path / "m3", layers=24), batches()[2]
    with simulated_cuda() as cuda:
        model = load_on(CUDA, "tiny_m3", folder)
        with cuda.forward() as launches:
            look = collected(model, sequences)
    look()
    assert {"embed", "unit_rows"} <= model.info.paths.keys()
    assert (launches["add_norm"], launches["embed"]) == (48, 1)
    assert 192 < launches.total() <= 200

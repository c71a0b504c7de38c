"""Every model on a simulated CUDA device: from its files to its results, and nothing waits.

The numbers are not computed; the tests of the operations look at those.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import BertModel, ModernBertModel, MPNetModel

from smart_embedder.engine.records import Outputs, TextEmbedding
from smart_embedder.models.families.load import overflows_float16
from smart_embedder.models.loader import load_embedder
from smart_embedder.models.ops import choose
from smart_embedder.models.tasks.embedders import M3Embedder
from smart_embedder.models.tasks.rerankers import QwenReranker
from tests.models.tasks.devices import (
    CUDA,
    EVERY,
    MODELS,
    TEXTS,
    embedded,
    reranked,
    started,
    target,
)
from tests.support.checkpoints import save_m3, save_qwen
from tests.support.simulated_cuda import SimulatedCuda, simulated_cuda
from tests.support.simulated_streams import ARRIVED
from tests.support.wordpiece import MODERNBERT, MPNET, save_colbert

DENSE = Outputs(dense=True)
KINDS = [Outputs(*flags) for flags in product((False, True), repeat=3) if any(flags)]
OF_A_LAYER = 8


@pytest.fixture
def cuda() -> Iterator[SimulatedCuda]:
    with simulated_cuda() as device:
        yield device


def load_m3(folder: Path, dtype: torch.dtype = torch.float16) -> M3Embedder:
    return M3Embedder("m3", folder, 8192, target(CUDA, dtype))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("capability", [(7, 5), (12, 0)])
def test_a_forward_waits_for_nothing_and_gives_a_result_for_each_sequence(
    name: str, capability: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    with simulated_cuda(capability) as cuda:
        model, sequences = started(MODELS[name], request, CUDA)
        with cuda.forward() as launches:
            collect = model.launch(sequences, [EVERY] * len(sequences))
    results = collect()
    assert len(results) == len(sequences)
    assert not any(isinstance(result, Exception) for result in results)
    new = capability >= (8, 0)
    assert launches["_flash_attention_forward"] == 2 * new
    assert launches["_efficient_attention_forward"] == 2 * (not new)


FAMILIES = {
    "unattended expansion": lambda folder: save_colbert(folder, BertModel),
    "packed, with a window": lambda folder: save_colbert(folder, ModernBertModel, **MODERNBERT),
    "padded": lambda folder: save_colbert(folder, MPNetModel, **MPNET),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_of_another_family_waits_for_nothing_either(
    cuda: SimulatedCuda, tmp_path: Path, family: str
) -> None:
    """Sequences are longer than the window, and queries filled up with unattended tokens."""
    with _disable_current_modes():
        folder = FAMILIES[family](tmp_path / "model")
    how = target(CUDA, qwen=overflows_float16(folder))
    model = load_embedder("colbert", folder, 512, how)
    for input_type in "query", "document":
        texts = model.tokenize([*TEXTS, "rank " * 90], input_type=input_type)
        sequences = [text.ids for text in texts]
        with cuda.forward() as launches:
            collect = model.launch(sequences, [EVERY] * len(sequences))
        assert all(isinstance(each, TextEmbedding) for each in collect())
        if family == "packed, with a window":  # The kernel once in each layer, window or not.
            assert launches["_flash_attention_forward"] == 2


def test_pairs_that_begin_alike_share_what_they_begin_with(
    cuda: SimulatedCuda, tiny_qwen: Path
) -> None:
    model = QwenReranker("qwen", tiny_qwen, 512, 16, target(CUDA, torch.bfloat16))
    with cuda.forward() as alone:
        model.launch(reranked(model)[:1], [EVERY])
    with cuda.forward() as together:
        model.launch(reranked(model), [EVERY] * len(TEXTS))
    # Two gathers in each of the two layers, and one at the end.
    assert together["index_select"] - alone["index_select"] == 5
    # Of more tokens the last layer gathers what is read instead.
    with cuda.forward() as together:
        model.launch(reranked(model) * 9, [EVERY] * len(TEXTS) * 9)
    assert together["index_select"] == 5


def test_each_text_has_the_kinds_it_asked_for(cuda: SimulatedCuda, tiny_m3: Path) -> None:
    """Every combination, beside every other in the same batch, and alone."""
    model = load_m3(tiny_m3)
    ids = embedded(model)[1]
    for outputs in (KINDS, *([each] for each in KINDS)):
        with cuda.forward() as launches:
            collect = model.launch([ids] * len(outputs), outputs)
        # As many as leave 200 for a model of 24 layers.
        assert launches.total() <= 200 - 22 * OF_A_LAYER
        for result, wanted in zip(collect(), outputs, strict=True):
            assert isinstance(result, TextEmbedding)
            for kind in ("dense", "sparse", "colbert"):
                assert (getattr(result, kind) is not None) == getattr(wanted, kind)
            if result.dense is not None:
                np.testing.assert_array_equal(result.dense, np.full(64, ARRIVED, np.float32))
            if result.colbert is not None:
                arrived = np.full((len(ids) - 1, 64), ARRIVED, np.float32)
                np.testing.assert_array_equal(result.colbert, arrived)


def test_the_mean_of_a_text_is_not_waited_for(cuda: SimulatedCuda, demo_checkpoint: Path) -> None:
    model = load_m3(demo_checkpoint)
    for kinds in (DENSE, EVERY):
        with cuda.forward() as launches:
            collect = model.launch(embedded(model), [kinds] * len(TEXTS))
        assert launches["segment_reduce"] == 1
        assert all(isinstance(result, TextEmbedding) for result in collect())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_token_vectors_travel_in_as_many_bytes_as_the_model_computes_in(
    cuda: SimulatedCuda, tiny_m3: Path, dtype: torch.dtype
) -> None:
    model = load_m3(tiny_m3, dtype)
    model.launch([np.full(100, 5, np.int64)], [Outputs(colbert=True)])()
    # Beside them one number for each token, by which those that are not finite are found.
    assert cuda.bytes_to_host == 100 * (64 * dtype.itemsize + 4)


@pytest.mark.parametrize("name", ["bge-m3", "Qwen3-Embedding", "Qwen3-Reranker"])
def test_products_in_float8_wait_for_nothing(
    name: str,
    cuda: SimulatedCuda,
    request: pytest.FixtureRequest,
) -> None:
    in_float8 = replace(target(CUDA, torch.bfloat16), float8=True)
    model, sequences = started(MODELS[name], request, CUDA, in_float8)
    assert model.info.dtype == "float8"
    with cuda.forward() as launches:
        results = model.launch(sequences, [EVERY] * len(sequences))()
    assert not any(isinstance(each, Exception) for each in results)
    # Four products in each of two layers, and each rounds its rows in one launch.
    assert launches["_scaled_mm"] == launches["float8_rows"] == 2 * 4


def test_after_an_error_the_next_forward_runs(cuda: SimulatedCuda, tiny_m3: Path) -> None:
    """Memory may be missing at the launch; while kernels run, their results' wait shows it."""
    model = load_m3(tiny_m3)
    sequences = embedded(model)
    outputs = [EVERY] * len(sequences)
    for operator in ("addmm", "_flash_attention_forward", "embed"):
        cuda.out_of_memory_at = operator
        with pytest.raises(torch.OutOfMemoryError):
            model.launch(sequences, outputs)
        cuda.out_of_memory_at = None
        assert len(model.launch(sequences, outputs)()) == len(sequences)
    collects = [model.launch(sequences, outputs) for _ in range(2)]
    cuda.error_at_collection = torch.AcceleratorError("CUDA error: out of memory")
    for collect in collects:
        with pytest.raises(torch.AcceleratorError):
            collect()
    cuda.error_at_collection = None
    assert len(model.launch(sequences, outputs)()) == len(sequences)


@pytest.fixture(scope="module")
def deep_m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_m3(tmp_path_factory.mktemp("deep") / "m3", layers=24)


def test_a_forward_of_as_many_layers_as_bge_m3_has_is_at_most_200_launches(
    cuda: SimulatedCuda, deep_m3: Path
) -> None:
    model = load_m3(deep_m3)
    # What several kinds are made of is gathered once. For dense vectors alone the last layer
    # computes no more than the first token of each text.
    many = embedded(model) * 16
    for kinds, gathers in ((DENSE, EVERY), 1), ((DENSE, DENSE), 2), ((EVERY, EVERY), 0):
        with cuda.forward() as launches:
            model.launch(many, kinds * 32)
        assert launches["add_norm"] == 48
        assert launches["embed"] == 1
        assert launches["index_select"] == gathers
        assert 200 - OF_A_LAYER < launches.total() <= 200


def test_it_is_at_most_260_where_the_kernels_are_not_compiled(
    cuda: SimulatedCuda, deep_m3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "load_kernels", lambda *_: None)
    model = load_m3(deep_m3)
    with cuda.forward() as launches:
        model.launch(embedded(model), (DENSE, EVERY) * 2)
    assert launches["native_layer_norm"] == 49
    assert launches.total() <= 260


def test_a_forward_of_as_many_layers_as_qwen3_has_is_at_most_420_launches(tmp_path: Path) -> None:
    """Also where pairs share what they begin with, which gathers in every layer."""
    folder = save_qwen(tmp_path / "qwen", layers=28)
    with simulated_cuda() as cuda:
        model = QwenReranker("qwen", folder, 512, 16, target(CUDA, qwen=True))
        for sequences in (reranked(model), reranked(model)[:1]):
            with cuda.forward() as launches:
                model.launch(sequences, [EVERY] * len(sequences))
            assert launches["rotary"] == launches["gate"] == 28
            assert launches.total() <= 420

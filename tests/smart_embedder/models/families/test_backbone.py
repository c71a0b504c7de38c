"""The backbone of all families: rows, threads, preemption by short forwards, and CUDA graphs.

The graphs run on a simulated device that records launches, copies and waits.
"""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from smart_embedder.devices.thread import DeviceThread
from smart_embedder.kernels.backend import torch_backend
from smart_embedder.kernels.packed_batch import End, PositionScheme, select_tokens
from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models import cuda_graphs
from smart_embedder.models.cuda_graphs import Bucket, GraphedForward
from smart_embedder.models.families import backbone
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.families.bert import Encoder
from smart_embedder.models.heads.dense import DenseEmbedder
from smart_embedder.models.heads.embedder import EmbeddingModel
from smart_embedder.models.heads.m3 import M3Embedder
from smart_embedder.models.heads.pooling import first, last
from smart_embedder.requests import Outputs
from smart_embedder.tokens import TokenIds
from tests.support.encoders import float32, save_family, word_tokenizer
from tests.support.simulated_cuda import SimulatedCuda, simulated_cuda

EVERY = Outputs(dense=True, sparse=True, colbert=True)
BUCKETS = (Bucket(32, 4, 32), Bucket(64, 8, 64))
# Launches beside the graph: copies of ids, positions and lengths, with their padding, and copies of
# states and heads.
WITH_GRAPH = 6


class FakeTransformer:
    """A transformer that computes nothing."""

    shares_prefixes = capturable = False
    rounds_up, window = True, None

    def __call__(self, packed, rows=None):
        return torch.zeros(packed.tokens if rows is None else len(rows), 4)


def backbone_of(device: str = "cpu", dtype: torch.dtype = torch.float32, **options) -> Backbone:
    transformer = FakeTransformer()
    vars(transformer).update(options)
    target = Target(torch.device(device), dtype, torch_backend())
    sizes = {"hidden_size": 4, "max_length": 70, "parameters": 100}
    return Backbone(transformer, target, **sizes, positions=PositionScheme(), configuration="none")


@pytest.mark.parametrize(("tokens", "multiple"), [(32, 1), (33, 8), (512, 8), (513, 32)])
def test_rows_are_rounded_up_on_a_cpu(tokens, multiple) -> None:
    sequences = [np.ones(tokens, np.int64)]
    rounded = -(-tokens // multiple) * multiple
    packed = backbone_of().pack(sequences)
    assert (packed.tokens, len(backbone_of().forward(packed))) == (rounded, rounded)
    assert backbone_of(rounds_up=False).pack(sequences).tokens == tokens
    two = [*sequences, np.ones(5, np.int64)]
    packed, multiple_of = backbone_of().pack(two), backbone_of().multiple_of
    selected, _ = select_tokens(packed, [True, False], multiple_of)
    assert len(selected) == rounded


def test_wire_dtype_is_as_exact_as_the_model() -> None:
    assert backbone_of("cpu", torch.bfloat16).wire_dtype is torch.float32
    assert backbone_of("cuda", torch.float32).wire_dtype is torch.float32
    assert backbone_of("cuda", torch.bfloat16).wire_dtype is torch.float16


def test_graphs_need_a_gpu_and_a_capturable_transformer() -> None:
    for model in (backbone_of(capturable=True), backbone_of("cuda")):
        assert list(model.capture_graphs_in_steps()) == []


@pytest.mark.parametrize(("layers", "times"), [(36, 12), (28, 14), (3, 1.5), (1, 1)])
def test_with_fewer_layers_keeps_the_first_and_returns_the_factor(
    layers: int, times: float
) -> None:
    layer_list = [object() for _ in range(layers)]
    few, found = Encoder(layer_list, None, None).with_fewer_layers()
    assert found == times
    assert few.layers == layer_list[: round(layers / times)]


@pytest.fixture(scope="module", params=["encoder", "decoder", "modernbert"])
def model(request, embedder: M3Embedder, tiny_qwen: Path, tmp_path_factory) -> EmbeddingModel:
    if request.param == "encoder":
        return embedder
    folder = tiny_qwen
    if request.param != "decoder":
        folder = tmp_path_factory.mktemp("backbone") / request.param
        save_family(folder, request.param, word_tokenizer())
    return DenseEmbedder("tiny", folder, 32_768, float32())


def dense(model: EmbeddingModel, sequences: list[np.ndarray]) -> np.ndarray:
    outputs = [Outputs(dense=True)] * len(sequences)
    return np.stack([embedding.dense for embedding in model.launch(sequences, outputs)()])


@pytest.mark.parametrize("end", ["first", "last"])
@torch.inference_mode()
def test_last_layer_computes_only_the_tokens_that_are_read(model: EmbeddingModel, end: End) -> None:
    rng = np.random.default_rng(0)
    prefix = rng.integers(5, 100, 40)
    texts = [rng.integers(5, 100, length) for length in (7, 1, 120, 60, 7)]
    texts += [np.concatenate((prefix, tail)) for tail in (texts[0], texts[2], texts[1])]
    texts *= 5  # Enough tokens that the last layer leaves some out, and not a round number.
    backbone = model._backbone
    packed = backbone.pack(texts)
    whole, same = backbone.forward_of(packed, None)
    assert same is packed
    states, alone = backbone.forward_of(packed, end)
    assert alone.lengths == [1] * len(packed.lengths)
    assert len(states) == -(-len(alone.lengths) // 8) * 8
    read = packed.offsets[:-1] if end == "first" else packed.offsets[1:] - 1
    for selected, whole_batch in ((states, whole), (alone.input_ids[0], packed.input_ids[0])):
        found, expected = selected[: len(texts)].float(), whole_batch[read][: len(texts)].float()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    pool = {"first": first, "last": last}[end]
    torch.testing.assert_close(pool(states, alone), pool(whole, packed), rtol=0, atol=1e-6)


async def test_preempted_and_preempting_forwards_have_the_same_vectors(
    model: EmbeddingModel,
) -> None:
    rng = np.random.default_rng(0)
    long = [rng.integers(5, 100, 200) for _ in range(8)]
    short = [rng.integers(5, 100, 7)]
    alone, alone_short = dense(model, long), dense(model, short)
    ended: list[str] = []
    both_wait = threading.Event()

    def run_long() -> np.ndarray:
        both_wait.wait()
        found = dense(model, long)
        ended.append("long")
        return found

    def run_short() -> np.ndarray:
        found = dense(model, short)
        ended.append("short")
        return found

    thread = DeviceThread("device")
    running = asyncio.create_task(thread.run(run_long))
    preempting = asyncio.create_task(thread.run(run_short, preempts=True))
    while len(thread._pending) < 2:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)
    both_wait.set()
    np.testing.assert_array_equal(await running, alone)
    np.testing.assert_array_equal(await preempting, alone_short)
    assert ended == ["short", "long"]
    await thread.close(10)


def test_preemption_restores_the_number_of_threads(monkeypatch) -> None:
    def run_with_fewer_threads() -> bool:
        torch.set_num_threads(1)
        return True

    threads = torch.get_num_threads()
    monkeypatch.setattr(backbone, "run_preempting_call", run_with_fewer_threads)
    try:
        torch.set_num_threads(2)
        backbone.preemption_point()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_attention_over_a_long_text_can_be_preempted_between_heads(
    model: EmbeddingModel, monkeypatch
) -> None:
    text = [np.random.default_rng(0).integers(5, 100, 300)]
    points = 0

    def count() -> bool:
        nonlocal points
        points += 1
        return False

    monkeypatch.setattr(backbone, "run_preempting_call", count)
    at_once, points_at_once = dense(model, text), points
    points = 0
    monkeypatch.setattr(backbone, "_MAX_SCORES_PER_CALL", 1)
    np.testing.assert_array_equal(dense(model, text), at_once)
    assert points > points_at_once


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    monkeypatch.setattr(backbone, "make_buckets", lambda: iter(BUCKETS))
    monkeypatch.setattr(
        cuda_graphs,
        "_time_forward",
        lambda forward, _: 1 if isinstance(forward, GraphedForward) else 2,
    )
    with simulated_cuda() as device:
        yield device


def load_with_graphs(folder: Path, dtype: torch.dtype = torch.float16) -> M3Embedder:
    device = torch.device("cuda:0")
    model = M3Embedder("m3", folder, 8192, Target(device, dtype, choose_backend(device, dtype)))
    model.capture_graphs()
    return model


def sequences(*lengths: int) -> list[TokenIds]:
    return [np.full(length, 5, np.int64) for length in lengths]


def test_small_batch_is_one_graph_launch(cuda: SimulatedCuda, tiny_m3: Path) -> None:
    model = load_with_graphs(tiny_m3)
    assert model.info.paths["launch"] == "graphs"
    for lengths in (7,), (20, 1, 3), (64,), (8,) * 8, (65,), (1,) * 9:
        small = sum(lengths) <= 64 and len(lengths) <= 8
        with cuda.forward() as launches:
            collect = model.launch(sequences(*lengths), [Outputs(dense=True)] * len(lengths))
        assert launches["graph"] == small
        assert launches["_flash_attention_forward"] == (0 if small else 2)
        assert launches.total() == WITH_GRAPH + 1 or not small
        assert len(collect()) == len(lengths)

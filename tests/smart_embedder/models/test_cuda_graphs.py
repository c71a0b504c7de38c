"""CUDA graphs of small batches, simulated with real numbers on a CPU, and on a GPU."""

import threading
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from smart_embedder.hardware.device import capture_lock
from smart_embedder.kernels.backend import torch_backend
from smart_embedder.kernels.packed_batch import PackedBatch, pack
from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models import cuda_graphs
from smart_embedder.models.cuda_graphs import (
    Bucket,
    GraphedForward,
    GraphedForwards,
    GraphTrial,
    make_buckets,
)
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.families.registry import load_own
from tests.support.cpu_graphs import CpuGraph, attend_as_on_a_gpu, cpu_graphs
from tests.support.encoders import FAMILIES, load, save_family, word_tokenizer

CPU = torch.device("cpu")
BUCKETS = (Bucket(16, 4, 16), Bucket(40, 6, 40), Bucket(40, 20, 12))
# Batches that fit a bucket: at most 20 sequences of at most 12 tokens, or 6 of any length.
LENGTHS = st.one_of(
    st.lists(st.integers(1, 12), min_size=1, max_size=20), st.lists(st.integers(1, 40), min_size=1)
).filter(lambda lengths: sum(lengths) <= 40 and (max(lengths) <= 12 or len(lengths) <= 6))


@pytest.fixture(scope="module", params=["decoder"])
def backbone(
    request: pytest.FixtureRequest,
    tiny_m3: Path,
    tiny_qwen: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Backbone:
    backend = torch_backend().prefer("gpu", attention=attend_as_on_a_gpu)
    target = Target(CPU, torch.float32, backend)
    if request.param in FAMILIES:
        folder = tmp_path_factory.mktemp("families") / request.param
        return load(save_family(folder, request.param, word_tokenizer()), target)._backbone
    if request.param == "decoder":
        return load_own(tiny_qwen, target, ())
    return load_own(tiny_m3, target, ())


@pytest.fixture(autouse=True)
def _graphs_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cuda_graphs,
        "_time_forward",
        lambda forward, _: 1 if isinstance(forward, GraphedForward) else 2,
    )


@pytest.fixture
def graphs(backbone: Backbone) -> GraphedForwards:
    return capture(backbone)


def capture(
    backbone: Backbone, graph: type[CpuGraph] = CpuGraph, **changed: Any
) -> GraphedForwards:
    trial = trial_of(backbone)
    with cpu_graphs(graph):
        return result_of(replace(trial, **changed).capture(BUCKETS, CPU))


def trial_of(backbone: Backbone) -> GraphTrial:
    pack_rows = partial(pack, device=CPU, positions=backbone._positions)
    return GraphTrial(backbone._transformer, pack_rows, backbone.max_length, 1e-4)


def result_of(steps: Generator[None, None, GraphedForwards]) -> GraphedForwards:
    """Run all steps of a capture, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def batch(backbone: Backbone, lengths: list[int]) -> PackedBatch:
    generator = np.random.default_rng(sum(lengths))
    sequences = [generator.integers(5, 100, length) for length in lengths]
    return pack(sequences, device=CPU, positions=backbone._positions)


@pytest.mark.parametrize(
    "backbone", ["encoder", "decoder", "modernbert", "embedding-gemma"], indirect=True
)
@given(batches=st.lists(LENGTHS, min_size=1, max_size=4))
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@torch.inference_mode()
def test_cuda_graph_states_equal_the_plain_forward(
    backbone: Backbone, graphs: GraphedForwards, batches: list[list[int]]
) -> None:
    assert [graph.bucket for graph in graphs.forwards] == list(BUCKETS)
    kept = []
    for lengths in batches:
        packed = batch(backbone, lengths)
        graph = graphs.find(packed)
        assert graph is not None
        kept.append((graph(packed), backbone.forward(packed)))
    # A later batch does not change the states of an earlier one.
    for actual, expected in kept:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class Stale(CpuGraph):
    """Computes nothing: the states stay those of the capture."""

    def replay(self) -> None:
        pass


class OutOfMemory(CpuGraph):
    """Cannot be captured."""

    def capture_end(self) -> None:
        super().capture_end()
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")


def reads_lengths(packed: PackedBatch) -> torch.Tensor:
    """A forward that reads lengths on the host, as some attention kernels do."""
    return torch.ones(packed.tokens, packed.max_length)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"graph": Stale}, "differs by"),
        ({"graph": OutOfMemory}, "raises OutOfMemoryError"),
        ({"forward": reads_lengths}, "raises NotImplementedError"),
    ],
)
def test_faulty_cuda_graph_is_refused_with_one_warning(backbone, fault, reason) -> None:
    with capture_logs() as logs:
        found = capture(backbone, **fault)
    assert found.forwards == ()
    assert reason in found.proof.reason
    (line,) = logs
    assert line["event"] == "path_refused"
    assert (line["operation"], line["path"], line["used_instead"]) == ("launch", "graphs", "eager")
    with capture_logs() as logs:
        assert len(capture(backbone).forwards) == 3
    assert logs == []


def test_failed_capture_releases_its_memory(backbone, monkeypatch) -> None:
    calls, names = [], ["_cuda_endAllocateToPool", "_cuda_releasePool"]
    for name in names:
        monkeypatch.setattr(
            torch._C, name, lambda *given, name=name: calls.append((name, *given)), raising=False
        )
    capture(backbone, OutOfMemory)
    assert calls == [(name, None, (0, 1)) for name in names]


def test_no_thread_empties_the_cuda_cache_during_a_capture(backbone) -> None:
    """PyTorch would raise an error in that thread, and fail the requests of the device."""
    acquired: list[bool] = []

    def try_to_acquire() -> None:
        acquired.append(capture_lock.acquire(blocking=False))
        if acquired[-1]:
            capture_lock.release()

    class Watched(CpuGraph):
        def capture_end(self) -> None:
            super().capture_end()
            thread = threading.Thread(target=try_to_acquire)
            thread.start()
            thread.join()

    capture(backbone, Watched)
    assert acquired == [False] * len(BUCKETS)
    try_to_acquire()
    assert acquired[-1]


def test_cuda_graph_that_is_no_faster_is_dropped(backbone, monkeypatch) -> None:
    slow = BUCKETS[1]

    def seconds(forward: Any, _: PackedBatch) -> float:
        graph = isinstance(forward, GraphedForward)
        return 3.0 if graph and forward.bucket == slow else 1.0 if graph else 2.0

    monkeypatch.setattr(cuda_graphs, "_time_forward", seconds)
    with capture_logs() as logs:
        found = capture(backbone)
    assert [graph.bucket for graph in found.forwards] == [BUCKETS[0], BUCKETS[2]]
    assert found.proof.holds
    assert logs == []


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ((7,), (32, 4, 32)),
        ((8,) * 4, (32, 4, 32)),
        ((33,), (64, 8, 64)),
        ((3,) * 5, (64, 8, 64)),
        ((8, 8, 8, 9), (64, 8, 64)),
        ((1500, 30), (1536, 21, 1536)),
        ((20,) * 100, (2048, 256, 128)),
        ((*[20] * 80, 300), None),
        ((2049,), None),
    ],
)
def test_smallest_bucket_that_fits_is_chosen(lengths, chosen) -> None:
    packed = pack([np.full(length, 5) for length in lengths], device=CPU)
    found = next((bucket for bucket in make_buckets() if bucket.holds(packed)), None)
    assert found == (chosen and Bucket(*chosen))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
GPU = torch.device("cuda")


def on_gpu(folder: Path) -> Backbone:
    target = Target(GPU, torch.float16, choose_backend(GPU, torch.float16))
    return load_own(folder, target, ())


@pytest.mark.device
@needs_gpu
@torch.inference_mode()
def test_cuda_graph_on_a_gpu_equals_the_plain_forward(tiny_m3: Path) -> None:
    backbone = on_gpu(tiny_m3)
    list(backbone.capture_graphs_in_steps())
    assert backbone.target.paths["launch"] == "graphs"
    for lengths in (7,), (30, 1, 3), (70,), (20,) * 50, (70,) * 20:
        packed = backbone.pack([np.full(length, 5) for length in lengths])
        states = [backbone.forward(packed) for _ in range(2)]
        for actual in states:
            torch.testing.assert_close(actual, backbone._transformer(packed), rtol=0.02, atol=0.02)


@pytest.mark.device
@needs_gpu
@torch.inference_mode()
def test_cuda_capture_that_synchronizes_leaves_the_gpu_usable(tiny_m3: Path) -> None:
    backbone = on_gpu(tiny_m3)
    forward = backbone._transformer

    def waiting(packed: PackedBatch) -> torch.Tensor:
        states = forward(packed)
        return states * (1 if states.isnan().any().item() else 2)

    trial = GraphTrial(waiting, backbone.pack, backbone.max_length, 0.005)
    assert not result_of(trial.capture(BUCKETS, GPU)).proof.holds
    # Raises if PyTorch's allocator still expected a capture.
    torch.cuda.empty_cache()
    list(backbone.capture_graphs_in_steps())
    assert backbone.target.paths["launch"] == "graphs"

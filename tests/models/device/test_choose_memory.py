"""The memory in use: of the control group where one has a limit, else of the machine."""

import queue
import threading
from pathlib import Path

import psutil
import pytest
import structlog
import torch

from smart_embedder.models.device import choose
from smart_embedder.models.device.choose import (
    capturing,
    control_group_usage,
    empty_cuda_cache,
    ensure_allocates,
    memory_usage,
    shortest,
)

MEMBERSHIP = {"v2": "0::/service/one\n", "v1": "5:memory,cpu:/service/one\n1:name=systemd:/x\n"}


@pytest.fixture
def membership(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "membership"
    path.write_text(MEMBERSHIP[request.param], "ascii")
    return path


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(text, "ascii")


@pytest.mark.parametrize("membership", ["v2"], indirect=True)
def test_version_2_counts_what_cannot_be_taken_back(tmp_path: Path, membership: Path) -> None:
    statistics = "anon 700\nfile 9000\nkernel 20\nshmem 3\nkernel_stack 7\n"
    own = tmp_path / "service" / "one"
    group(own, memory_max="1000\n", memory_stat=statistics)
    group(tmp_path / "service", memory_max="max\n", memory_stat="anon 1\n")
    usage = control_group_usage(tmp_path, membership)
    assert usage is not None
    assert (usage.used, usage.total) == (723, 1000)


@pytest.mark.parametrize("membership", ["v1"], indirect=True)
def test_version_1_has_other_names(tmp_path: Path, membership: Path) -> None:
    statistics = "cache 9000\nrss 5\nshmem 2\ntotal_cache 1\ntotal_rss 400\ntotal_shmem 6\n"
    own = tmp_path / "memory" / "service" / "one"
    group(own, memory_limit_in_bytes="1000\n", memory_stat=statistics)
    unlimited = str(2**63 - 4096)
    group(tmp_path / "memory", memory_limit_in_bytes=unlimited, memory_stat="total_rss 1\n")
    usage = control_group_usage(tmp_path, membership)
    assert usage is not None
    assert (usage.used, usage.total) == (406, 1000)


@pytest.mark.parametrize("membership", ["v2"], indirect=True)
def test_the_lowest_limit_of_a_group_and_those_above_counts(
    tmp_path: Path, membership: Path
) -> None:
    group(tmp_path / "service" / "one", memory_max="1000\n", memory_stat="anon 1\n")
    group(tmp_path / "service", memory_max="500\n", memory_stat="anon 300\n")
    usage = control_group_usage(tmp_path, membership)
    assert usage is not None
    assert (usage.used, usage.total) == (300, 500)


@pytest.mark.parametrize("membership", ["v2", "v1"], indirect=True)
def test_without_a_limit_there_is_no_group_to_count(tmp_path: Path, membership: Path) -> None:
    assert control_group_usage(tmp_path, membership) is None


def test_no_more_than_the_machine_has_is_in_use() -> None:
    usage = memory_usage(torch.device("cpu"))
    assert 0 < usage.used < usage.total <= psutil.virtual_memory().total


@pytest.mark.parametrize("membership", ["v2"], indirect=True)
@pytest.mark.parametrize(("bytes_more", "counts"), [(-1, True), (0, False), (1, False)])
def test_a_group_counts_where_its_limit_is_below_what_the_machine_has(
    tmp_path, membership, monkeypatch, bytes_more, counts
) -> None:
    limit = psutil.virtual_memory().total + bytes_more
    group(tmp_path / "service" / "one", memory_max=f"{limit}\n", memory_stat="anon 7\n")
    monkeypatch.setattr(choose, "CGROUPS", tmp_path)
    monkeypatch.setattr(choose, "MEMBERSHIP", membership)
    usage = memory_usage(torch.device("cpu"))
    assert (usage.used == 7, usage.total == limit) == (counts, counts or not bytes_more)
    assert 0 < usage.own < psutil.Process().memory_info().rss + (1 << 28)


def test_on_other_devices_it_is_that_of_their_drivers(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 7)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 9)
    usage = memory_usage(torch.device("cuda:0"))
    assert (usage.used, usage.total, usage.own) == (70, 100, 50)
    usage = memory_usage(torch.device("mps"))
    assert (usage.used, usage.total, usage.own) == (7, 9, None)


@pytest.mark.parametrize(
    ("seconds", "runs", "shortest_of_them"),
    [([0.1, 0.02, 0.05], 3, 0.02), ([0.05, 0.2, 0.01], 2, 0.05), ([0.2, 0.1], 1, 0.2)],
)
def test_the_shortest_of_a_few_runs_counts_and_long_ones_are_repeated_less(
    seconds, runs, shortest_of_them
) -> None:
    at, done = 0.0, []

    def run() -> None:
        nonlocal at
        at += seconds[len(done)]
        done.append(at)

    assert shortest(run, lambda: at) == pytest.approx(shortest_of_them)
    assert len(done) == runs


class Allocator:
    """PyTorch's, on a device where expandable segments fail, or where nothing can be allocated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, broken: bool = False) -> None:
        self.broken = broken
        self.expandable = True
        monkeypatch.setattr(torch, "empty", self.allocate)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.set_options)
        ensure_allocates.cache_clear()

    def allocate(self, *_: object, device: torch.device) -> None:
        if self.broken or self.expandable:
            raise RuntimeError("CUDA driver error: operation not supported\nAt some place")

    def set_options(self, options: str) -> None:
        self.expandable = options != "expandable_segments:False"


def test_where_expandable_segments_fail_the_start_goes_on_without_them(monkeypatch) -> None:
    Allocator(monkeypatch)
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            ensure_allocates(torch.device("cuda:0"))
    assert [(line["event"], line["reason"]) for line in lines] == [
        ("expandable_segments_refused", "CUDA driver error: operation not supported")
    ]


def test_a_device_on_which_nothing_can_be_allocated_stops_the_start(monkeypatch) -> None:
    Allocator(monkeypatch, broken=True)
    with pytest.raises(RuntimeError, match="not supported"):
        ensure_allocates(torch.device("cuda:0"))


def test_devices_without_such_segments_are_left_alone(monkeypatch) -> None:
    Allocator(monkeypatch, broken=True)
    ensure_allocates(torch.device("cpu"))


def test_memory_is_given_back_each_time_and_in_no_capture(monkeypatch) -> None:
    calls = queue.SimpleQueue[bool]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.put(capturing_now.is_set()))
    capturing_now = threading.Event()
    with capturing:
        capturing_now.set()
        other = threading.Thread(target=empty_cuda_cache)
        other.start()
        capturing_now.clear()
    other.join()
    empty_cuda_cache()
    assert [calls.get_nowait(), calls.get_nowait()] == [False, False]
    assert calls.empty()

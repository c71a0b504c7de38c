"""Threads of a forward under a CPU quota, the workers' shares of the cores, and large pages."""

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smart_embedder.errors import StartupError
from smart_embedder.hardware import cpu
from smart_embedder.hardware.cpu import (
    CpuShare,
    LargePages,
    available_threads,
    cat_in_large_pages,
    divide_cpus,
    lower_thread_priority,
    set_threads,
    share_cpus,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")


@pytest.mark.parametrize(
    ("flop", "threads"),
    [(0, 1), (1, 1), (0.5e9, 1), (0.5e9 + 1, 2), (3.5e9, 7), (3.5e9 + 1, 8), (4e9 + 1, 8)],
)
def test_set_threads_adds_a_thread_for_every_half_gigaflop(
    flop: float, threads: int, monkeypatch
) -> None:
    chosen = []
    monkeypatch.setattr(cpu, "available_threads", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 0)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    set_threads(flop)
    set_threads(flop, fixed=3)
    assert chosen == [threads, 3]


def test_available_threads_do_not_shrink_after_a_small_batch() -> None:
    before = torch.get_num_threads()
    try:
        set_threads(1)
        assert torch.get_num_threads() == 1
        set_threads(1e15)
        assert torch.get_num_threads() == available_threads()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
        ({"cpu.max": "50000 100000\n"}, "0::/\n", 0.5),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 2.0),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "50000 100000"}, "0::/a/b\n", 0.5),
        (
            {"cpu/d/cpu.cfs_quota_us": "300000\n", "cpu/d/cpu.cfs_period_us": "100000\n"},
            "4:cpuacct,cpu:/d\n2:memory:/d\n",
            3.0,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/d\n", None),
        ({"cpu.max": "100000 100000"}, "", 1.0),
        ({}, None, None),
    ],
)
def test_threads_fit_the_smallest_cpu_quota_of_the_control_groups(
    files, membership, expected, monkeypatch, tmp_path: Path
) -> None:
    for name, content in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    if membership is not None:
        (tmp_path / "self").write_text(membership)
    monkeypatch.setattr(cpu, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cpu, "_MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert cpu.cpu_quota() == expected
    assert available_threads.__wrapped__() == (
        2 if expected is None else max(1, min(2, int(expected)))
    )


@linux_only
def test_lower_thread_priority_changes_only_the_calling_thread() -> None:
    seen: list[int] = []

    def look() -> None:
        lower_thread_priority()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [5]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that simulates a machine with memory nodes such as `0-3,8`."""

    def make(*nodes: str, threads: int, cores: dict[int, int], usable: int) -> None:
        for number, cpus in enumerate(nodes):
            (tmp_path / f"node{number}").mkdir()
            (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
        for number, core in cores.items():
            (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
            (tmp_path / f"cpu{number}" / "topology" / "core_id").write_text(f"{core}\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(usable)})
        monkeypatch.setattr(cpu, "available_threads", lambda: threads)
        monkeypatch.setattr(cpu, "_NODES", tmp_path)
        monkeypatch.setattr(cpu, "_CPUS", tmp_path)

    return make


@linux_only
@pytest.mark.parametrize(
    ("nodes", "threads", "cores", "cpus", "on_nodes", "threads_each"),
    [
        # Each node has one worker.
        (("0-3", "4-7"), 8, {}, [[0, 1, 2, 3], [4, 5, 6, 7]], [0, 1], 4),
        (("0-2,6", "3-5,7"), 8, {}, [[0, 1, 2, 6], [3, 4, 5, 7]], [0, 1], 4),
        # Several workers divide a node.
        (("0-3", "4-7"), 8, {}, [[0, 1], [2, 3], [4, 5], [6, 7]], [0, 0, 1, 1], 2),
        # The two CPUs of a core stay together; PyTorch uses one thread for each core.
        (("0-3",), 2, {0: 0, 1: 1, 2: 0, 3: 1}, [[0, 2], [1, 3]], [0, 0], 1),
        # A quota leaves fewer threads than CPUs.
        (("0-15",), 5, {}, [[*range(8)], [*range(8, 16)]], [0, 0], 2),
        # A node without CPUs has no worker.
        (("0,1", ""), 2, {}, [[0], [1]], [0, 0], 1),
        # A system that shows no nodes has one.
        ((), 4, {}, [[0, 1], [2, 3]], [0, 0], 2),
    ],
)
def test_share_cpus_by_memory_node(
    machine, nodes, threads, cores, cpus, on_nodes, threads_each
) -> None:
    names = [f"cpu:{number}" for number in range(len(cpus))]
    machine(*nodes, threads=threads, cores=cores, usable=sum(map(len, cpus)))
    shares = share_cpus(names)
    assert [share.name for share in shares] == names
    assert [sorted(share.cpus) for share in shares] == cpus
    assert [share.node for share in shares] == on_nodes
    assert {share.threads for share in shares} == {threads_each}


def test_share_cpus_refuses_more_workers_than_cores(machine) -> None:
    machine("0-1", threads=2, cores={}, usable=2)
    with pytest.raises(StartupError) as caught:
        share_cpus(["cpu:0", "cpu:1", "cpu:2"])
    assert str(caught.value) == (
        "DEVICE=cpu:0,cpu:1,cpu:2 names 3 workers, and this process may use 2 of the machine's "
        "cores: name at most 2"
    )


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    workers=st.integers(1, 12),
)
def test_divide_cpus_gives_each_cpu_to_one_worker(sizes: list[int], workers: int) -> None:
    cpus = iter(range(sum(sizes)))
    nodes = [[next(cpus) for _ in range(size)] for size in sizes]
    parts = divide_cpus(nodes, workers)
    assert len(parts) == workers
    assert sorted(cpu for _, part in parts for cpu in part) == list(range(sum(sizes)))
    if workers >= len(nodes):
        assert all(set(part) <= set(nodes[node]) for node, part in parts)


@linux_only
def test_bind_thread_changes_only_the_calling_thread() -> None:
    before = os.sched_getaffinity(0)
    first = min(before)
    for cpus, bound_to in (({first}, {first}), ({1023}, before)):
        share = CpuShare("cpu:0", 0, frozenset(cpus), 1)
        assert share.run(lambda: os.sched_getaffinity(0)) == bound_to
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cat_in_large_pages_equals_torch_cat(dtype: torch.dtype, dim: int) -> None:
    parts = torch.rand(7, 9, 3).to(dtype).split([2, 1, 4] if dim == 0 else [4, 4, 1], dim)
    joined = cat_in_large_pages((part.clone() for part in parts), 7 if dim == 0 else 9, dim)
    assert torch.equal(joined, torch.cat(parts, dim))
    assert joined.is_contiguous()


@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 5, 2**20, 2**22])), max_size=6)
)
@settings(max_examples=20, deadline=None)
def test_large_pages_copies_are_separate_and_aligned(shapes: list[tuple[int, int]]) -> None:
    memory, copies = LargePages(), []
    for number, shape in enumerate(shapes):
        original = torch.full(shape, number, dtype=torch.int8).t()
        copies.append(memory.copy(original))
        assert copies[-1].shape == original.shape
    for number, copy in enumerate(copies):
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
        assert bool((copy == number).all())


@linux_only
def test_large_pages_are_freed_with_their_last_copy() -> None:
    def mapped() -> int:
        return psutil.Process().memory_info().vms

    memory = LargePages()
    copies = [memory.copy(torch.zeros(2**20)) for _ in range(40)]  # 160 MiB in all.
    before = mapped()
    copies.clear()
    # The stretch for further copies stays.
    assert before - mapped() > 140 * 2**20

"""How many threads a batch is worth under a quota, how workers share the cores, and memory."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.errors import StartupError
from smart_embedder.models.device import cpu
from smart_embedder.models.device.cpu import (
    CpuShare,
    available_threads,
    cat_in_large_pages,
    cpu_quota,
    divide,
    leave_processor_to_others,
    parse_cpu_list,
    set_threads,
    share_cpus,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone binds threads")


@pytest.fixture
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("flop", "threads"),
    [(0, 1), (1, 1), (0.5e9, 1), (0.5e9 + 1, 2), (3.5e9, 7), (3.5e9 + 1, 8), (4e9 + 1, 8)],
)
def test_a_thread_is_added_for_every_half_gigaflop_up_to_all_there_are(
    flop: float, threads: int, monkeypatch
) -> None:
    chosen = []
    monkeypatch.setattr(cpu, "available_threads", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 0)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    set_threads(flop)
    set_threads(flop, fixed=3)
    assert chosen == [threads, 3]


@pytest.mark.usefixtures("threads_as_before")
def test_a_model_loaded_after_a_small_batch_still_has_every_thread() -> None:
    set_threads(1)
    assert torch.get_num_threads() == 1
    set_threads(1e15)
    assert torch.get_num_threads() == available_threads()


def make_group(root: Path, files: dict[str, str], membership: str) -> tuple[Path, Path]:
    """A tree of control groups and the file that says to which one the process belongs."""
    cgroups = root / "cgroup"
    for name, content in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (root / "self").write_text(membership)
    return cgroups, root / "self"


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
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
        ({}, "", None),
    ],
)
def test_the_smallest_quota_of_the_control_groups_counts(
    files, membership, expected, tmp_path: Path
) -> None:
    assert cpu_quota(*make_group(tmp_path, files, membership)) == expected
    assert cpu_quota(tmp_path / "none", tmp_path / "nothing") is None


@pytest.mark.parametrize(("quota", "threads"), [("50000", 1), ("100000", 1), ("max", 2)])
def test_threads_fit_the_quota(monkeypatch, quota, threads, tmp_path: Path) -> None:
    cgroups, membership = make_group(tmp_path, {"cpu.max": f"{quota} 100000"}, "0::/")
    monkeypatch.setattr(cpu, "CGROUPS", cgroups)
    monkeypatch.setattr(cpu, "MEMBERSHIP", membership)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert available_threads.__wrapped__() == threads


@linux_only
def test_only_the_thread_itself_steps_back() -> None:
    seen: list[int] = []

    def look() -> None:
        leave_processor_to_others()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [5]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a machine of nodes such as `0-3,8`, with the threads that PyTorch would use."""

    def make(*nodes: str, threads: int, cores: dict[int, int] | None = None) -> dict[str, Path]:
        for number, cpus in enumerate(nodes):
            (tmp_path / f"node{number}").mkdir()
            (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
        for number, core in (cores or {}).items():
            (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
            (tmp_path / f"cpu{number}" / "topology" / "core_id").write_text(f"{core}\n")
        usable = {number for cpus in nodes for number in parse_cpu_list(cpus)}
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
        monkeypatch.setattr(cpu, "available_threads", lambda: threads)
        return {"nodes": tmp_path, "cpus": tmp_path}

    return make


@linux_only
@pytest.mark.parametrize(
    ("nodes", "threads", "cores", "cpus", "on_nodes", "threads_each"),
    [
        # Each node has a worker of its own.
        (("0-3", "4-7"), 8, {}, [[0, 1, 2, 3], [4, 5, 6, 7]], [0, 1], 4),
        # Several workers divide a node.
        (("0-3", "4-7"), 8, {}, [[0, 1], [2, 3], [4, 5], [6, 7]], [0, 0, 1, 1], 2),
        # The two threads of a core stay together; PyTorch uses one thread for each core.
        (("0-3",), 2, {0: 0, 1: 1, 2: 0, 3: 1}, [[0, 2], [1, 3]], [0, 0], 1),
        # A quota leaves fewer threads than CPUs.
        (("0-15",), 5, {}, [[*range(8)], [*range(8, 16)]], [0, 0], 2),
        # A node with memory alone has no worker.
        (("0-1", ""), 2, {}, [[0], [1]], [0, 0], 1),
    ],
)
def test_workers_share_the_cores_node_by_node(
    machine, nodes, threads, cores, cpus, on_nodes, threads_each
) -> None:
    names = [f"cpu:{number}" for number in range(len(cpus))]
    shares = share_cpus(names, **machine(*nodes, threads=threads, cores=cores))
    assert [share.name for share in shares] == names
    assert [sorted(share.cpus) for share in shares] == cpus
    assert [share.node for share in shares] == on_nodes
    assert {share.threads for share in shares} == {threads_each}


@linux_only
def test_where_the_system_shows_no_nodes_there_is_one(machine, tmp_path: Path) -> None:
    paths = machine("0-3", threads=4) | {"nodes": tmp_path / "absent"}
    shares = share_cpus(["cpu:0", "cpu:1"], **paths)
    assert [sorted(share.cpus) for share in shares] == [[0, 1], [2, 3]]


def test_more_workers_than_cores_stop_the_start(machine) -> None:
    with pytest.raises(StartupError) as caught:
        share_cpus(["cpu:0", "cpu:1", "cpu:2"], **machine("0-1", threads=2))
    assert str(caught.value) == (
        "DEVICE=cpu:0,cpu:1,cpu:2 names 3 workers, and this process may use 2 of the machine's "
        "cores: name at most 2"
    )


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    workers=st.integers(1, 12),
)
def test_no_cpu_is_given_twice_and_none_is_left(sizes: list[int], workers: int) -> None:
    cpus = iter(range(sum(sizes)))
    nodes = [[next(cpus) for _ in range(size)] for size in sizes]
    parts = divide(nodes, workers)
    assert len(parts) == workers
    assert sorted(cpu for _, part in parts for cpu in part) == list(range(sum(sizes)))
    if workers >= len(nodes):
        assert all(set(part) <= set(nodes[node]) for node, part in parts)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-2,7\n", [0, 1, 2, 7]), ("5\n", [5]), ("\n", []), ("", [])]
)
def test_the_kernels_lists_are_read(text: str, cpus: list[int]) -> None:
    assert list(parse_cpu_list(text)) == cpus


@linux_only
def test_a_bound_thread_has_the_cpus_and_no_other_thread_changes() -> None:
    before = os.sched_getaffinity(0)
    first = min(before)
    share = CpuShare("cpu:0", 0, frozenset({first}), 1)
    assert share.run(lambda: os.sched_getaffinity(0)) == {first}
    assert os.sched_getaffinity(0) == before


@linux_only
def test_cpus_that_are_gone_bind_nothing() -> None:
    share = CpuShare("cpu:0", 0, frozenset({1023}), 1)
    assert share.run(lambda: os.sched_getaffinity(0)) == os.sched_getaffinity(0)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_are_joined_as_they_come(dtype: torch.dtype, dim: int) -> None:
    parts = torch.rand(7, 9, 3).to(dtype).split([2, 1, 4] if dim == 0 else [4, 4, 1], dim)
    joined = cat_in_large_pages((each.clone() for each in parts), 7 if dim == 0 else 9, dim)
    assert torch.equal(joined, torch.cat(parts, dim))
    assert joined.is_contiguous()

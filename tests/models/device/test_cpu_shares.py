"""How the cores are shared out among several workers, on machines of every kind."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.errors import StartupError
from smart_embedder.models.device import cpu as cpu_shares
from smart_embedder.models.device.cpu import divide, parse_cpu_list, share_cpus

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone binds threads")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a machine of nodes such as `0-3,8`, with the threads that PyTorch would use."""

    def make(*nodes: str, threads: int, cores: dict[int, int] | None = None) -> dict[str, Path]:
        for number, cpus in enumerate(nodes):
            (tmp_path / f"node{number}").mkdir()
            (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
        for cpu, core in (cores or {}).items():
            (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
            (tmp_path / f"cpu{cpu}" / "topology" / "core_id").write_text(f"{core}\n")
        usable = {cpu for cpus in nodes for cpu in parse_cpu_list(cpus)}
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
        monkeypatch.setattr(cpu_shares, "available_threads", lambda: threads)
        return {"nodes": tmp_path, "cpus": tmp_path}

    return make


def cpus_of(shares) -> list[list[int]]:
    return [sorted(share.cpus) for share in shares]


@linux_only
def test_each_node_has_a_worker_of_its_own(machine) -> None:
    shares = share_cpus(["cpu:0", "cpu:1"], **machine("0-3", "4-7", threads=8))
    assert cpus_of(shares) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [share.node for share in shares] == [0, 1]
    assert [share.threads for share in shares] == [4, 4]


@linux_only
def test_workers_of_one_node_divide_it(machine) -> None:
    names = [f"cpu:{number}" for number in range(4)]
    shares = share_cpus(names, **machine("0-3", "4-7", threads=8))
    assert cpus_of(shares) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [share.node for share in shares] == [0, 0, 1, 1]


@linux_only
def test_the_two_threads_of_a_core_stay_together(machine) -> None:
    """PyTorch uses one thread for each core, and so do two workers together."""
    siblings = {0: 0, 1: 1, 2: 0, 3: 1}
    shares = share_cpus(["cpu:0", "cpu:1"], **machine("0-3", threads=2, cores=siblings))
    assert cpus_of(shares) == [[0, 2], [1, 3]]
    assert [share.threads for share in shares] == [1, 1]


@linux_only
def test_a_quota_leaves_fewer_threads_than_cpus(machine) -> None:
    shares = share_cpus(["cpu:0", "cpu:1"], **machine("0-15", threads=5))
    assert [len(share.cpus) for share in shares] == [8, 8]
    assert [share.threads for share in shares] == [2, 2]


@linux_only
def test_a_node_with_memory_alone_has_no_worker(machine) -> None:
    assert cpus_of(share_cpus(["cpu:0", "cpu:1"], **machine("0-1", "", threads=2))) == [[0], [1]]


@linux_only
def test_where_the_system_shows_no_nodes_there_is_one(machine, tmp_path: Path) -> None:
    paths = machine("0-3", threads=4) | {"nodes": tmp_path / "absent"}
    assert cpus_of(share_cpus(["cpu:0", "cpu:1"], **paths)) == [[0, 1], [2, 3]]


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
def test_a_bound_thread_has_the_cpus_and_no_other_thread_changes(monkeypatch) -> None:
    before = os.sched_getaffinity(0)
    cpu = min(before)
    share = cpu_shares.CpuShare("cpu:0", 0, frozenset({cpu}), 1)
    assert share.run(lambda: os.sched_getaffinity(0)) == {cpu}
    assert os.sched_getaffinity(0) == before


@linux_only
def test_cpus_that_are_gone_bind_nothing() -> None:
    share = cpu_shares.CpuShare("cpu:0", 0, frozenset({1023}), 1)
    assert share.run(lambda: os.sched_getaffinity(0)) == os.sched_getaffinity(0)

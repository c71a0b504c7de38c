"""How many threads there are under a quota, and how many of them a batch is worth."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from smart_embedder.models.device import cpu
from smart_embedder.models.device.cpu import (
    CpuThreads,
    available_threads,
    cpu_quota,
    leave_processor_to_others,
)


@pytest.fixture(autouse=True)
def threads_as_before():
    available_threads()
    yield
    torch.set_num_threads(available_threads())


def test_work_below_half_a_gigaflop_runs_on_one_thread() -> None:
    assert CpuThreads(parameters=100_000).choose(tokens=1024) == 1


@pytest.mark.parametrize(
    ("tokens", "threads"),
    [(1, 1), (1_000_000, 1), (1_000_001, 2), (7_000_000, 7), (7_000_001, 8), (8_000_001, 8)],
)
def test_a_thread_is_added_for_every_half_gigaflop(tokens: int, threads: int, monkeypatch) -> None:
    """Two operations for each parameter and token: one product, one sum."""
    monkeypatch.setattr(cpu, "available_threads", lambda: 8)
    assert CpuThreads(parameters=250).choose(tokens) == threads
    assert CpuThreads(parameters=250, fixed=3).choose(tokens) == 3


def test_large_work_gets_every_thread_and_no_more() -> None:
    assert CpuThreads(parameters=300_000_000).choose(tokens=1024) == available_threads()


def test_a_model_loaded_after_a_small_batch_still_has_every_thread() -> None:
    CpuThreads(parameters=1).set_for(tokens=1)
    assert torch.get_num_threads() == 1
    later = CpuThreads(parameters=300_000_000)
    later.set_for(tokens=1024)
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


@pytest.mark.parametrize(("quota", "threads"), [("50000", 1), ("100000", 1), ("max", 2)])
def test_threads_fit_the_quota(monkeypatch, quota, threads, tmp_path: Path) -> None:
    cgroups, membership = make_group(tmp_path, {"cpu.max": f"{quota} 100000"}, "0::/")
    monkeypatch.setattr(cpu, "CGROUPS", cgroups)
    monkeypatch.setattr(cpu, "MEMBERSHIP", membership)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert available_threads.__wrapped__() == threads


def test_where_there_are_no_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path / "nothing") is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_only_the_thread_itself_steps_back() -> None:
    seen: list[int] = []

    def look() -> None:
        leave_processor_to_others()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before

"""The memory in use: of the control group where one has a limit, else of the machine."""

from pathlib import Path

import psutil
import pytest
import torch

from app.models.device.memory import control_group_usage, memory_usage

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

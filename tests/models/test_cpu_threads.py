"""How many threads a batch is worth, and that a small one does not cost a later one its threads."""

import pytest
import torch

from app.models.cpu_threads import CpuThreads, available_threads


@pytest.fixture(autouse=True)
def threads_as_before():
    available_threads()
    yield
    torch.set_num_threads(available_threads())


def test_work_below_half_a_gigaflop_runs_on_one_thread() -> None:
    assert CpuThreads(parameters=100_000).choose(tokens=1024) == 1


def test_large_work_gets_every_thread_and_no_more() -> None:
    assert CpuThreads(parameters=300_000_000).choose(tokens=1024) == available_threads()


def test_a_model_loaded_after_a_small_batch_still_has_every_thread() -> None:
    CpuThreads(parameters=1).set_for(tokens=1)
    assert torch.get_num_threads() == 1
    later = CpuThreads(parameters=300_000_000)
    later.set_for(tokens=1024)
    assert torch.get_num_threads() == available_threads()

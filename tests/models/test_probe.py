"""The start-up probe: what it measures, and that it ends in time."""

import numpy as np
import pytest
import torch

from app.models import probe
from app.models.batch.shared_prefix import find_shared_prefixes
from app.models.device.timing import shortest
from app.models.probe import measure

CPU = torch.device("cpu")


def best_of(*seconds: float) -> tuple[float, int]:
    """What `shortest` makes of runs that take so many seconds, and how many it wanted."""
    clock, waiting = [0.0], list(seconds)

    def run() -> None:
        clock[0] += waiting.pop(0)

    return shortest(run, lambda: clock[0]), len(seconds) - len(waiting)


def test_the_best_of_three_runs_counts() -> None:
    assert best_of(0.0625, 0.03125, 0.046875, 0.015625) == (0.03125, 3)


@pytest.mark.parametrize(("seconds", "runs"), [((0.125, 0.25, 0.125), 2), ((1.5, 1.0), 1)])
def test_fewer_are_enough_where_they_are_long(seconds: tuple[float, ...], runs: int) -> None:
    assert best_of(*seconds) == (seconds[0], runs)


def test_it_stops_before_a_size_whose_forward_would_take_too_long() -> None:
    found = list(measure(lambda tokens: tokens / 1000, [128, 256, 512, 1024]))
    assert [one.tokens for one in found] == [128, 256, 512]


def test_the_first_size_is_measured_however_long_it_takes() -> None:
    (found,) = measure(lambda tokens: tokens / 10, [512, 1024])
    assert (found.tokens, found.seconds) == (512, 51.2)


def test_it_stops_where_a_larger_batch_is_no_faster() -> None:
    seconds = {512: 1.0, 1024: 1.5, 2048: 2.95, 4096: 5.0}
    found = list(measure(seconds.__getitem__, list(seconds), longest=100))
    assert [one.tokens for one in found] == [512, 1024, 2048]


def test_a_busy_moment_at_a_small_size_does_not_end_it() -> None:
    seconds = {128: 1.0, 256: 9.0, 512: 2.0, 1024: 3.0, 2048: 6.5}
    found = list(measure(seconds.__getitem__, list(seconds), longest=100))
    assert [one.tokens for one in found] == [128, 256, 512, 1024, 2048]


def test_on_a_real_model_it_chooses_one_of_the_sizes(embedder) -> None:
    budget = probe.probe(embedder, CPU)
    assert budget.tokens in probe._SIZES  # the sizes are its own affair
    assert budget.seconds_per_token > 0


def test_no_size_is_measured_that_would_keep_others_waiting(embedder, monkeypatch) -> None:
    seen: list[int] = []

    def a_second(run) -> float:
        run()
        return 1.0

    launch = type(embedder).launch

    def note(self, sequences, outputs):
        seen.append(sum(map(len, sequences)))
        return launch(self, sequences, outputs)

    monkeypatch.setattr(probe, "shortest", a_second)
    monkeypatch.setattr(type(embedder), "launch", note)
    *steps, budget = probe.probe_in_steps(embedder, CPU, longest_run=0.5)
    assert set(steps) == {None}
    assert budget is not None
    # The first one tells that all others would take longer.
    assert seen == [128, 512]
    assert budget.tokens == 512


class Recorder:
    """Takes note of what it is asked for."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.sequences: list[np.ndarray] = []

    def launch(self, sequences, outputs):
        self.sequences = sequences
        return list


@pytest.mark.parametrize("longest", [16, 8192])
def test_no_text_that_is_measured_begins_like_another(longest: int) -> None:
    """A causal model would compute it once, and look far faster and smaller than it is."""
    model = Recorder(longest)
    probe.warm_up(model, 4096)
    assert sum(map(len, model.sequences)) == 4096
    assert find_shared_prefixes(model.sequences) is None


def test_a_cpu_does_not_tell_how_many_tokens_fit(embedder) -> None:
    assert probe.tokens_that_fit(embedder, CPU) is None


def test_memory_is_measured_with_long_texts_too(monkeypatch) -> None:
    """A model whose attention takes a byte for each pair of tokens of one text."""
    model = Recorder(8192)
    gpu = {
        "memory_allocated": lambda _: 0,
        "max_memory_allocated": lambda _: sum(len(ids) ** 2 for ids in model.sequences),
        "reset_peak_memory_stats": lambda _: None,
        "mem_get_info": lambda _: (10 * 4096**2, 10 * 4096**2),
    }
    for name, stand_in in gpu.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(probe, "empty_cuda_cache", lambda: None)
    assert probe.tokens_that_fit(model, torch.device("cuda")) == 8 * 4096

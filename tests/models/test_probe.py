"""The start-up probe: what it measures, and that it ends in time."""

import torch

from app.models import probe
from app.models.probe import measure

CPU = torch.device("cpu")


def test_it_takes_the_better_of_two_forwards_of_each_size() -> None:
    seconds = iter([0.15, 0.1, 0.19, 0.15, 0.15, 0.4])
    found = list(measure(lambda _: next(seconds), [128, 256, 512]))
    assert [(one.tokens, one.seconds) for one in found] == [(128, 0.1), (256, 0.15), (512, 0.15)]


def test_one_forward_is_enough_where_it_is_long() -> None:
    seconds = iter([0.1, 0.2, 0.6])
    found = list(measure(lambda _: next(seconds), [128, 512]))
    assert [(one.tokens, one.seconds) for one in found] == [(128, 0.1), (512, 0.6)]


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


def test_a_cpu_does_not_tell_how_many_tokens_fit(embedder) -> None:
    assert probe.tokens_that_fit(embedder, CPU) is None

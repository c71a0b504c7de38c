"""A million steps of the engine in virtual time, and that a seed repeats a run."""

import pytest

from tests.simulation.scenario import run

# Steps of each test: one callback of the event loop is a step.
STEPS = 100_000
MOST_STEPS_OF_A_SEED = 6_000


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_no_law_is_broken_in_a_hundred_thousand_steps(first: int) -> None:
    steps, seed = 0, first
    while steps < STEPS:
        report = run(seed, MOST_STEPS_OF_A_SEED)
        assert report.broken is None, f"seed {seed}: {report.broken}"
        steps += report.steps
        seed += 1


def test_a_seed_repeats_a_run() -> None:
    for seed in (5, 8):
        assert run(seed, 4000) == run(seed, 4000)

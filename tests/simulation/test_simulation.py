"""The engine in virtual time breaks no law, and a seed repeats a run."""

import pytest

from tests.simulation.scenario import run

SEEDS = range(12)
# Callbacks of the event loop.
MOST_STEPS_OF_A_SEED = 6_000


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_no_law_is_broken(seed: int) -> None:
    report = run(seed, MOST_STEPS_OF_A_SEED)
    assert report.broken is None


def test_a_seed_repeats_a_run() -> None:
    assert run(1, 4000) == run(1, 4000)

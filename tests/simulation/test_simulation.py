"""The engine in virtual time breaks no law, and a seed repeats a run."""

import pytest

from tests.simulation.scenario import run

SEEDS_OF_A_TEST = 10
# Of callbacks of the event loop; 400,000 in all.
MOST_STEPS_OF_A_SEED = 6_000


# Among these are the seeds that find what `python -m scripts.simulate --faults` plants.
@pytest.mark.long
@pytest.mark.parametrize("first", [0, 10, 20, 30, 90, 100, 110])
def test_no_law_is_broken(first: int) -> None:
    for seed in range(first, first + SEEDS_OF_A_TEST):
        report = run(seed, MOST_STEPS_OF_A_SEED)
        assert report.broken is None, f"seed {seed}: {report.broken}"


def test_a_seed_repeats_a_run() -> None:
    for seed in (5, 8):
        assert run(seed, 4000) == run(seed, 4000)

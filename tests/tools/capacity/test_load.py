"""A load is drawn as it is described, and the same one for the same seed."""

import numpy as np
import pytest

from tools.capacity.cost import Load, LoadError, parse_lengths


@pytest.mark.parametrize(
    ("described", "mean", "least", "most"),
    [("30", 30, 30, 30), ("20:60", 40, 20, 60), ("10*3,50", 20, 10, 50)],
)
def test_lengths_are_drawn_as_described(described: str, mean: float, least: int, most: int) -> None:
    drawn = parse_lengths(described)(np.random.default_rng(0), 20_000)
    assert np.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert (min(drawn), max(drawn)) == (least, most)


@pytest.mark.parametrize("described", ["", "x", "0", "5:2", "10*-1", "10*0", "1:2:3"])
def test_what_is_no_distribution_is_one_sentence(described: str) -> None:
    with pytest.raises(LoadError, match="is no distribution of tokens"):
        parse_lengths(described)


def test_requests_come_at_the_rate_and_the_same_ones_for_a_seed() -> None:
    load = Load(50, parse_lengths("20:60"), texts=3, clients=4)
    asked = list(load.arrivals(5000, seed=3))
    assert asked == list(load.arrivals(5000, seed=3))
    assert asked != list(load.arrivals(5000, seed=4))
    assert 5000 / asked[-1].time == pytest.approx(50, rel=0.05)
    assert {each.client for each in asked} == {"0", "1", "2", "3"}
    assert all(len(each.lengths) == 3 for each in asked)
    # Independent of one another: the gaps vary as much as they are long on average.
    gaps = np.diff([each.time for each in asked])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)

"""Times become a model of cost, and travel as JSON; a load is drawn as it is described."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.capacity.cost import (
    CostModel,
    Load,
    MeasuredTime,
    PlanError,
    TimeTable,
    fit,
    parse_lengths,
    read_times,
)

TERMS = st.floats(1e-6, 1e-2)


def table_of(cost: CostModel) -> TimeTable:
    shapes = [(texts, tokens) for texts in (1, 4, 16) for tokens in (8, 40, 200, 900)]
    times = [
        MeasuredTime(
            *(texts, tokens, cost.forward([tokens] * texts)),
            *(cost.tokenize([tokens] * texts), cost.rest([tokens] * texts)),
        )
        for texts, tokens in shapes
    ]
    return TimeTable("dense", "a device", 512, overlapping=False, times=times)


@given(st.tuples(TERMS, TERMS, TERMS), st.floats(1e-9, 1e-6))
def test_times_that_follow_the_model_give_it_back(
    terms: tuple[float, float, float], pairs: float
) -> None:
    made = CostModel((*terms, pairs), terms, terms)
    found = fit(table_of(made))
    for lengths in ([20], [100, 30, 7], [900] * 4):
        assert found.forward(lengths) == pytest.approx(made.forward(lengths), rel=1e-3)
        assert found.tokenize(lengths) == pytest.approx(made.tokenize(lengths), rel=1e-3)
        assert found.rest(lengths) == pytest.approx(made.rest(lengths), rel=1e-3)
        # Several forwards cost their beginning several times.
        more = made.forward(lengths) + 2 * terms[0]
        assert made.forward(lengths, forwards=3) == pytest.approx(more)


def test_no_term_is_below_zero_and_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = table_of(CostModel((1e-3, 0.0, 1e-4, 1e-7)))
    table.write(tmp_path / "times.json")
    assert read_times(tmp_path / "times.json") == table
    falling = [replace(each, forward=1 / each.tokens) for each in table.times]
    found = fit(replace(table, times=falling))
    assert min(found.forward_terms) >= 0
    with pytest.raises(PlanError, match="there are no times"):
        fit(replace(table, times=[]))


WRONG = json.dumps(asdict(table_of(CostModel((1.0, 0.0, 0.0, 0.0))))).replace("16", '"a"')


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"times": [{"texts": 1}]}), WRONG])
def test_a_file_of_something_else_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "times.json").write_text(content)
    with pytest.raises(PlanError, match=r"times\.json holds no times of this tool"):
        read_times(tmp_path / "times.json")


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
    with pytest.raises(PlanError, match="is no distribution of tokens"):
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

"""From seconds and vectors to the rows of the table."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.adapters.interface import Setting
from benchmarks.ceiling import Encoder
from benchmarks.comparison import Outcome
from benchmarks.figures import Figures, Row, Work, format_table, median_ceilings, worst_cosine
from benchmarks.worker import Encoded

WORK = Work([10, 30], Encoder(hidden=64, layers=2, inner=256))
EAST, NORTH = [1.0, 0.0], [0.0, 1.0]


def outcome(name: str, *seconds: float, failure: str = "") -> Outcome:
    rounds = [Encoded([each], 2**20 * (place + 1)) for place, each in enumerate(seconds)]
    return Outcome(name, Setting(4), "1.0", rounds, failure)


def make_rows(folder: Path, *outcomes: Outcome) -> dict[str, Row]:
    for one in outcomes:
        np.savez(folder / f"{one.name}.npz", dense=np.array([EAST, NORTH], np.float32))
    figures = Figures(
        {one.name: one for one in outcomes},
        WORK,
        {"float32": 1e6},
        lambda one: folder / f"{one.name}.npz",
    )
    return {row.engine: row for row in figures.rows()}


def test_rates_come_from_the_median_round_and_memory_from_the_worst(tmp_path: Path) -> None:
    speed = make_rows(tmp_path, outcome("flagembedding", 9, 4, 5))["flagembedding"].speed
    assert speed is not None
    assert (speed.texts_per_second, speed.tokens_per_second) == (2 / 5, 40 / 5)
    assert speed.peak_mib == 3
    assert speed.share == pytest.approx(WORK.encoder.flop([10, 30]) / 5 / 1e6)


def test_the_ratio_is_to_the_faster_of_the_two_settings_of_flagembedding(tmp_path: Path) -> None:
    names = ("smart-embedder-float32", "flagembedding-defaults", "flagembedding")
    rows = make_rows(tmp_path, *map(outcome, names, (2, 40, 10)))
    ratios = [row.speed.ratio for row in rows.values() if row.speed]
    assert ratios == [5, 0.25, 1]


def test_without_flagembedding_there_is_no_ratio(tmp_path: Path) -> None:
    speed = make_rows(tmp_path, outcome("openvino-int8", 1))["openvino-int8"].speed
    assert speed is not None
    assert (speed.ratio, speed.share, speed.dense) == (None, None, None)


def test_an_engine_that_failed_is_a_row_with_its_reason(tmp_path: Path) -> None:
    failed = outcome("m3serve", 3, failure="no memory")
    rows = make_rows(tmp_path, outcome("flagembedding", 2), failed)
    assert rows["m3serve"].speed is None
    table = format_table(list(rows.values()))
    assert table.endswith("- m3serve did not run: no memory")
    lines = table.splitlines()[:4]
    assert len({(len(line), line.count("|")) for line in lines}) == 1


def test_the_ceiling_is_the_median_of_the_rounds_that_have_it() -> None:
    rounds = [{"float32": 1.0, "int8": 7.0}, {"float32": 9.0}, {"float32": 3.0}]
    assert median_ceilings(rounds) == {"float32": 3.0, "int8": 7.0}


def test_the_worst_cosine_counts_and_a_missing_kind_has_none() -> None:
    one = {"dense": np.array([EAST, EAST], np.float32)}
    other = {"dense": np.array([EAST, NORTH], np.float32), "colbert": np.zeros((3, 2), np.float32)}
    assert worst_cosine(one, other, "dense") == 0
    assert worst_cosine(one, other, "colbert") is None


def test_an_engine_whose_vectors_are_not_those_of_the_texts_has_no_figures(tmp_path: Path) -> None:
    names = ("flagembedding", "m3serve")
    make_rows(tmp_path, *map(outcome, names, (1, 2)))
    np.savez(tmp_path / "m3serve.npz", dense=np.array([EAST], np.float32))
    outcomes = {name: outcome(name, 1) for name in names}
    figures = Figures(outcomes, WORK, {}, lambda one: tmp_path / f"{one.name}.npz")
    exact, other = figures.rows()
    assert exact.speed is not None
    assert (other.speed, other.failure) == (None, "its dense vectors are (1, 2) instead of (2, 2)")

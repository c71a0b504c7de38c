"""From seconds and vectors to the rows of the table."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.adapters import Setting
from benchmarks.comparison import Outcome, Row, format_table, rows_of, worst_cosine
from benchmarks.worker import Encoded

EAST, NORTH = [1.0, 0.0], [0.0, 1.0]


@pytest.fixture
def make(tmp_path: Path):
    """Rows by name, of the seconds of an engine's rounds or of why it has none."""

    def make_rows(vectors: dict[str, list] | None = None, **seconds: tuple[float, ...] | str):
        outcomes = []
        for key, took in seconds.items():
            name, file = key.replace("_", "-"), tmp_path / f"{key}.npz"
            np.savez(file, dense=np.array((vectors or {}).get(key, [EAST, NORTH]), np.float32))
            failure = took if isinstance(took, str) else ""
            rounds = [Encoded([s], 2**20 * n) for n, s in enumerate(() if failure else took, 1)]
            outcomes.append(Outcome(name, file, Setting(4), "1.0", rounds, failure))
        rows = rows_of(outcomes, [10, 30])
        return {row.engine: row for row in rows}

    return make_rows


def test_rates_come_from_the_median_round_and_memory_from_the_worst(make) -> None:
    speed = make(flagembedding=(9, 4, 5))["flagembedding"].speed
    assert (speed.texts_per_second, speed.tokens_per_second) == (2 / 5, 40 / 5)
    assert speed.peak_mib == 3


def test_the_ratio_is_to_the_faster_of_the_two_settings_of_flagembedding(make) -> None:
    rows = make(smart_embedder_float32=(2,), flagembedding_defaults=(40,), flagembedding=(10,))
    assert [row.speed.ratio for row in rows.values()] == [5, 0.25, 1]


def test_without_flagembedding_there_is_no_ratio(make) -> None:
    speed = make(openvino_int8=(1,))["openvino-int8"].speed
    assert (speed.ratio, speed.dense) == (None, None)


def test_an_engine_that_failed_is_a_row_with_its_reason(make) -> None:
    rows: dict[str, Row] = make(flagembedding=(2,), m3serve="no memory")
    assert rows["m3serve"].speed is None
    table = format_table(list(rows.values()))
    assert table.endswith("- m3serve did not run: no memory")
    lines = table.splitlines()[:4]
    assert len({(len(line), line.count("|")) for line in lines}) == 1


def test_an_engine_whose_vectors_are_not_those_of_the_texts_has_no_figures(make) -> None:
    rows = make({"m3serve": [EAST]}, flagembedding=(1,), m3serve=(1,))
    assert rows["flagembedding"].speed is not None
    assert rows["m3serve"].speed is None
    assert rows["m3serve"].failure == "its dense vectors are (1, 2) instead of (2, 2)"


def test_the_worst_cosine_counts_and_a_missing_kind_has_none() -> None:
    one = {"dense": np.array([EAST, EAST], np.float32)}
    other = {"dense": np.array([EAST, NORTH], np.float32), "colbert": np.zeros((3, 2), np.float32)}
    assert worst_cosine(one, other, "dense") == 0
    assert worst_cosine(one, other, "colbert") is None

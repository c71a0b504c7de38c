"""`smart-embedder check`: how many texts have other vectors now, and that none has by chance."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from smart_embedder_client.ingest.check import main
from smart_embedder_client.ingest.drift import TOLERANCES, _cosine
from smart_embedder_client.qdrant.store import Point, Store, Vectors

from tests.client.ingest.conftest import Runs
from tests.support.server import RunningServer, run_server

KINDS = ["dense", "sparse", "colbert"]


@pytest.fixture
def check(edge_runs: Runs, capsys: pytest.CaptureFixture[str]):
    """Runs the command for the collection of `edge_runs`; what it printed."""

    def run(server: RunningServer | str, *options: str, status: int = 0) -> str:
        url = server if isinstance(server, str) else server.url
        target = edge_runs.target
        where = [target.collection, "--qdrant", target.address, "--url", url]
        capsys.readouterr()
        assert main([*where, *options]) == status
        out, err = capsys.readouterr()
        return err if status == 2 else out

    return run


@pytest.mark.parametrize(
    "options", [{}, {"datatype": "float16"}, {"datatype": "uint8"}, {"colbert_pool_factor": 2}]
)
def test_the_same_texts_have_the_same_vectors_however_they_are_stored(
    edge_runs: Runs, server: RunningServer, other_server: RunningServer, check, options
) -> None:
    points = edge_runs.run(**options).points
    found = json.loads(check(server, "--json"))
    assert (found["points"], found["difference"]) == (points, None)
    assert list(found["drift"]) == list(found["vector_space"]) == KINDS
    for each in found["drift"].values():
        assert (each["texts"], each["drifted"]) == (points, 0)
        assert each["worst"] >= 1 - each["tolerance"] >= 1 - max(TOLERANCES.values())
    other = json.loads(check(other_server, "--json", status=1))
    assert "weights" in other["difference"]
    assert {each["drifted"] for each in other["drift"].values()} == {points}


def test_each_text_with_other_vectors_is_counted(
    edge_runs: Runs, server: RunningServer, check
) -> None:
    points = edge_runs.run().points
    ids = edge_runs.ids()[:2]
    stored = edge_runs.look(lambda store: store.read(ids, with_vectors=True))

    def turn(store: Store, point: Point, kinds: set[str]) -> None:
        dense, colbert = (-v if k in kinds else v for k, v in ours(point.vectors))
        vectors = Vectors(dense, point.vectors.sparse, colbert)
        store.upsert([Point(point.id, vectors, point.payload)])

    def ours(vectors: Vectors):
        return [("dense", vectors.dense), ("colbert", vectors.colbert)]

    edge_runs.look(lambda store: turn(store, stored[0], {"dense"}))
    edge_runs.look(lambda store: turn(store, stored[1], {"dense", "colbert"}))
    lines = check(server, status=1).splitlines()
    assert [line.partition(" texts")[0] for line in lines[:3]] == [
        f"dense: 2 of {points}",
        f"sparse: 0 of {points}",
        f"colbert: 1 of {points}",
    ]
    assert "(cosine 1.0000 at the median, -1.0000 at worst)" in lines[0]
    name = edge_runs.target.collection
    assert lines[3].endswith(f"smart-embedder ingest --migrate --collection {name}")
    assert f"dense: 0 of {points}" in check(server, "--tolerance", "2.1")
    few = json.loads(check(server, "--json", "--sample", "1", "--tolerance", "3"))
    assert few["drift"]["dense"]["texts"] == 1


def test_another_space_with_the_same_vectors_is_told_and_is_no_drift(
    edge_runs: Runs, tiny_m3: Path, older_server: str, tmp_path: Path, check
) -> None:
    """As where only longer texts would be cut."""
    edge_runs.run()
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "BGE_EMBED_MAX_LENGTH": "1024"}
    with run_server(tmp_path, **settings) as shorter:
        told = check(shorter).splitlines()
    parts = [f"{kind}: truncation: 1024end, was 2048end" for kind in sorted(KINDS)]
    assert told[0] == f"The service's vectors are of another space: {'; '.join(parts)}"
    assert [line.split()[1] for line in told[1:]] == ["0", "0", "0"]
    # An older one is compared all the same.
    assert check(older_server).splitlines()[0].startswith("dense: 0 of ")


def test_what_cannot_be_compared_is_another_status(
    edge_runs: Runs, server: RunningServer, closed_port: str, check, monkeypatch
) -> None:
    assert "there is no collection" in check(server, status=2)
    edge_runs.run(kinds=frozenset({"sparse"}))
    edge_runs.look(lambda store: store.delete(store.page(None, None)[0]))
    assert "has a text and vectors" in check(server, status=2)
    monkeypatch.setattr("smart_embedder_client.ingest.check._PATIENCE", 0.1)
    assert "no connection to" in check(closed_port, status=2)


NUMBERS = st.floats(-10, 10, width=32)
ROWS = arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(2, 9)), elements=NUMBERS)


@given(ROWS, st.floats(0.125, 8), st.floats(-4, 4))
def test_a_cosine_knows_no_length_and_without_a_shift_none_of_these(rows, scale, shift) -> None:
    rows += np.arange(rows.shape[1], dtype=np.float32) * 50
    assert _cosine(rows, rows * scale, is_shifted=False) == pytest.approx(1, abs=1e-5)
    assert _cosine(rows, rows * scale + shift, is_shifted=True) == pytest.approx(1, abs=1e-5)
    assert _cosine(rows, -rows, is_shifted=True) == pytest.approx(-1, abs=1e-5)
    assert _cosine(rows, rows[:, :-1], is_shifted=False) == 0
    assert _cosine(rows, None, is_shifted=False) == 0

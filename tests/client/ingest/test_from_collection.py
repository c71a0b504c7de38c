"""`ingest --from-collection`: all texts get new vectors, and a killed run can be resumed."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from smart_embedder_client import Client
from smart_embedder_client.ingest.command import main
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.from_collection import ingest_collection
from smart_embedder_client.ingest.options import LoadOptions, Report
from smart_embedder_client.qdrant.store import QdrantError

from tests.client.ingest.conftest import Runs
from tests.support.server import RunningServer


def make_new_runs(runs: Runs, url: str) -> Runs:
    """Runs into a new collection of the same Qdrant, with another service."""
    target = replace(runs.target, collection=f"{runs.target.collection}-new")
    return replace(runs, url=url, target=target)


def copy_collection(runs: Runs, new: Runs, **options: Any) -> Report:
    load_options = LoadOptions(patience=60.0, **options)
    return asyncio.run(ingest_collection(load_options, runs.target.collection, new.target, new.url))


def arguments(runs: Runs, new: Runs, *more: str) -> list[str]:
    where = ["--qdrant", new.target.address, "--collection", new.target.collection]
    source = ["--from-collection", runs.target.collection]
    return [*source, "--url", new.url, *where, "--no-grpc", *more]


def read_payloads(runs: Runs) -> dict[str, dict[str, Any]]:
    ids = runs.ids()
    points = runs.query_store(lambda store: store.read(ids, with_vectors=False))
    return {point.id: dict(point.payload) for point in points}


def check_vectors(new: Runs, expected: dict[str, dict[str, Any]]) -> None:
    """Check the payloads by id, and that the vectors are those of the service."""
    points = new.query_store(lambda store: store.read(list(expected), with_vectors=True))
    assert new.query_store(lambda store: store.count(None)) == len(expected)
    assert {point.id: dict(point.payload) for point in points} == expected
    texts = [point.payload["text"] for point in points]
    with Client(new.url) as client:
        embedded = client.embed_documents(texts, return_colbert=True)
    for i, point in enumerate(points):
        np.testing.assert_allclose(point.vectors.dense, embedded.dense[i], atol=1e-5)
        np.testing.assert_allclose(point.vectors.colbert, embedded.colbert[i], atol=1e-5)
        found, weights = point.vectors.sparse.as_dict(), embedded.sparse[i].as_dict()
        assert found == pytest.approx(weights, abs=1e-5)
    assert new.query_store(lambda store: store.origin()).vector_space == embedded.vector_space


@pytest.mark.parametrize("runs", ["http", "edge"], indirect=True)
def test_points_are_copied_with_new_vectors(
    runs: Runs, other_server: RunningServer, folder: Path
) -> None:
    points = runs.run().points
    before, new = read_payloads(runs), make_new_runs(runs, other_server.url)
    found = copy_collection(runs, new)
    assert (found.uploaded, found.points, found.is_complete) == (points, points, True)
    check_vectors(new, before)
    assert read_payloads(runs) == before
    # The next run copies points that were added meanwhile.
    (folder / "more.txt").write_text("Another text about winter.")
    runs.run()
    again = copy_collection(runs, new)
    assert (again.uploaded, again.points) == (1, points + 1)
    # An ingest of the files finds its points.
    new.journal.unlink()
    assert new.run().uploaded == 0


def test_point_without_text_is_reported(
    edge_runs: Runs, other_server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    points = edge_runs.run(kinds=frozenset({"sparse"})).points
    (id_, *_) = edge_runs.ids()
    (first,) = edge_runs.query_store(lambda store: store.read([id_], with_vectors=True))
    bare = replace(first, payload={"dataset": "texts", "source": "by hand"})
    edge_runs.query_store(lambda store: store.upsert([bare]))
    new = make_new_runs(edge_runs, other_server.url)
    assert main(arguments(edge_runs, new)) == 1
    assert "by hand: it has no text that could be embedded\n" in capsys.readouterr().out
    assert new.query_store(lambda store: store.count(None)) == points - 1


def test_copy_may_have_another_datatype_and_fewer_kinds_but_no_other_vector_space(
    edge_runs: Runs, server: RunningServer, other_server: RunningServer
) -> None:
    points = edge_runs.run().points
    new = make_new_runs(edge_runs, server.url)
    origin = edge_runs.query_store(lambda store: store.origin())
    renamed = replace(origin, models=["before"] * 3)
    edge_runs.query_store(lambda store: store.set_origin(renamed))
    copy_collection(edge_runs, new, datatype="float16", kinds=frozenset({"dense"}))
    # The ids of the points were made from these names.
    assert new.query_store(lambda store: store.origin()).models == ["before"] * 3
    layout = new.query_store(lambda store: store.layout())
    assert (layout.kinds, layout.datatype) == ({"dense"}, "float16")
    assert len(new.ids()) == points
    with pytest.raises(QdrantError, match="than those of the collection .*-new"):
        copy_collection(edge_runs, replace(new, url=other_server.url), kinds=frozenset({"dense"}))
    with pytest.raises(IngestError, match="cannot be its own source"):
        copy_collection(edge_runs, edge_runs)
    nowhere = replace(edge_runs, target=replace(edge_runs.target, collection="nowhere"))
    with pytest.raises(IngestError, match="there is no collection nowhere"):
        copy_collection(nowhere, new)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: SOURCE, or --from-collection"),
        (["texts", "--from-collection", "old"], "that the collection has: leave out SOURCE"),
        (["--from-collection", "old", "--chunk-tokens", "9"], "has: leave out --chunk-tokens"),
        (["--from-collection", "old", "--sync"], "has: leave out --sync"),
    ],
)
def test_contradicting_options_are_refused(options: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--collection", "texts", *options])
    assert message in capsys.readouterr().err

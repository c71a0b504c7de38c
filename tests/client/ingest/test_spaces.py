"""Collections store their vector spaces, and runs never mix vectors of different ones."""

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from smart_embedder_client import Client
from smart_embedder_client.qdrant.store import (
    ORIGIN_KEY,
    Depths,
    Origin,
    OtherSpaceError,
    QdrantError,
    Store,
    TextVectors,
)

from tests.client.ingest.conftest import Runs
from tests.support.qdrant.process import QdrantServer
from tests.support.server import RunningServer
from tests.support.waiting import LIMIT

KINDS = ("dense", "sparse", "colbert")


def read_spaces(server: RunningServer) -> dict[str, str]:
    with Client(server.url) as client:
        return client.embed(["river"], return_colbert=True).vector_space


def forget_origin(runs: Runs) -> None:
    """Remove the origin, as in a collection of an earlier version."""
    folder = Path(runs.target.address.removeprefix("edge:"), runs.target.collection)
    (folder / "smart_embedder.json").unlink()


def test_origin_is_stored_in_the_collection(runs: Runs, server: RunningServer) -> None:
    """The origin is not counted, listed or found like a point."""
    points = runs.run().points
    origin = runs.query_store(lambda store: store.origin())
    assert origin.vector_space == read_spaces(server)
    assert set(origin.vector_space) == set(KINDS)

    def read_all(store: Store) -> tuple[int, int, int]:
        query = TextVectors(dense=np.ones(64, np.float32))
        hits = store.search(query, Depths(1_000, 1_000, 1_000))["dense"]
        return store.count(None), len(store.sample(1_000)), len(hits)

    assert runs.query_store(read_all) == (points, points, points)
    assert runs.run().uploaded == 0
    assert runs.query_store(lambda store: store.origin()) == origin


def test_vectors_of_another_vector_space_are_refused_before_anything_changes(
    runs: Runs, other_server: RunningServer, folder: Path
) -> None:
    """Names and sizes are the same, and there may be something to store or nothing."""
    runs.run()
    before = runs.ids()
    other = replace(runs, url=other_server.url)
    for _ in range(2):
        with pytest.raises(OtherSpaceError) as caught:
            other.run(sync=True)
        message = str(caught.value)
        name = runs.target.collection
        assert message.startswith(
            f"the service's vectors are of another space than those of the collection {name} ("
        )
        assert re.search(r"; dense-[0-9a-f]{12} here, wanted dense-[0-9a-f]{12}", message)
        assert message.endswith(
            f": smart-embedder ingest --from-collection {name} --collection NEW"
        )
        assert "\n" not in message
        (folder / "lid.txt").write_text("A new text about the river.")
    assert sorted(runs.ids()) == sorted(before)


def test_alias_is_resolved_at_the_start_of_a_run(
    http_runs: Runs, qdrant: QdrantServer, folder: Path
) -> None:
    """It is moved to vectors of another space during the run."""
    points, name = http_runs.run().points, http_runs.target.collection

    def move_alias(collection: str) -> None:
        alias = models.CreateAlias(collection_name=collection, alias_name=f"{name}-alias")
        with closing(QdrantClient(http_runs.target.address, check_compatibility=False)) as client:
            client.update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])

    move_alias(name)
    aliased = replace(http_runs, target=replace(http_runs.target, collection=f"{name}-alias"))
    (folder / "more.txt").write_text("more about the river")

    def make_another(store: Store) -> None:
        store.open_other(f"{name}-new").create(store.layout(), None)

    qdrant.fail(status=503)
    with aliased.started() as process:
        qdrant.wait_for(name, lambda state: state["faults"] >= 1)
        http_runs.query_store(make_another)
        move_alias(f"{name}-new")
        qdrant.fail()
        _, notes = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, notes
    assert http_runs.query_store(lambda store: store.count(None)) == points + 1
    assert aliased.query_store(lambda store: store.count(None)) == 0


def test_model_names_are_compared_without_a_stored_vector_space(
    edge_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier versions store no vector space, nor does Qdrant before 1.16."""
    points = edge_runs.run().points
    forget_origin(edge_runs)
    capsys.readouterr()
    assert edge_runs.run(recheck=True).points == points
    assert capsys.readouterr().err == (
        "the collection does not say in which space its vectors are: only the names of the models "
        "are compared\n"
    )
    assert edge_runs.query_store(lambda store: store.origin()) is None

    ids = edge_runs.ids()

    def rename(store: Store) -> None:
        found = store.read(ids, with_vectors=True)
        store.upsert(
            [replace(point, payload={**point.payload, "model": "other"}) for point in found]
        )

    edge_runs.query_store(rename)
    with pytest.raises(OtherSpaceError, match="has vectors of other, and the service makes"):
        edge_runs.run()


def test_vector_space_of_a_kind_added_later_is_stored(
    edge_runs: Runs, server: RunningServer
) -> None:
    edge_runs.run()
    origin = edge_runs.query_store(lambda store: store.origin())
    partly = replace(origin, vector_space={"dense": origin.vector_space["dense"]})
    edge_runs.query_store(lambda store: store.set_origin(partly))
    edge_runs.run()
    assert edge_runs.query_store(lambda store: store.origin()).vector_space == read_spaces(server)


def test_older_service_is_reported_once(
    edge_runs: Runs, older_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may fill a new collection, or one with a vector space."""
    older, message = replace(edge_runs, url=older_server), "the service does not say in which space"
    assert older.run().uploaded > 3
    assert capsys.readouterr().err.count(message) == 1
    assert edge_runs.query_store(lambda store: store.origin()) is None
    edge_runs.run()
    capsys.readouterr()
    (edge_runs.options.source / "more.txt").write_text("more about the river")
    assert older.run().uploaded == 1
    assert capsys.readouterr().err.count(message) == 1


def test_renamed_model_stores_nothing_twice(edge_runs: Runs, server: RunningServer) -> None:
    """Its folder may be renamed: the ids are made from the first names."""
    points = edge_runs.run().points
    origin = edge_runs.query_store(lambda store: store.origin())
    before = replace(origin, models=["before"] * 3)
    edge_runs.query_store(lambda store: store.delete(store.page("texts", None)[0]))
    edge_runs.query_store(lambda store: store.set_origin(before))
    edge_runs.run()
    renamed = set(edge_runs.ids())
    assert len(renamed) == points
    edge_runs.journal.unlink()
    assert edge_runs.run().uploaded == 0


def test_foreign_metadata_is_refused_and_unknown_fields_are_ignored() -> None:
    for metadata in (5, {"vector_space": 5}, {}):
        with pytest.raises(QdrantError, match="are not understood"):
            Origin.of_metadata({ORIGIN_KEY: metadata})
    origin = Origin({"dense": "dense-1"}, models=["a", "b", "c"])
    metadata = {ORIGIN_KEY: {**origin.metadata[ORIGIN_KEY], "tomorrow": 1}, "yours": 2}
    assert Origin.of_metadata(metadata) == origin
    assert Origin.of_metadata({"yours": 2}) is Origin.of_metadata(None) is None

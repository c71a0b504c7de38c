"""Collections store their vector spaces, and runs never mix vectors of different ones."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from qdrant_client import QdrantClient, models
from smart_embedder_client import Client
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.qdrant.store import ORIGIN_KEY, Origin, QdrantError, Store

from tests.client.ingest.conftest import Runs
from tests.support.qdrant.process import QdrantServer
from tests.support.server import RunningServer
from tests.support.waiting import LIMIT


def forget_origin(runs: Runs) -> None:
    folder = Path(runs.target.address.removeprefix("edge:"), runs.target.collection)
    (folder / "smart_embedder.json").unlink()


def test_vectors_of_another_vector_space_are_refused_before_anything_changes(
    runs: Runs, server: RunningServer, other_server: RunningServer, folder: Path
) -> None:
    """Names and sizes are the same, and there may be something to store or nothing."""
    runs.run()
    with Client(server.url) as client:
        spaces = client.embed(["river"], return_colbert=True).vector_space
    assert runs.query_store(lambda store: store.origin()).vector_space == spaces
    before = runs.ids()
    other = replace(runs, url=other_server.url)
    for _ in range(2):
        with pytest.raises(QdrantError) as caught:
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
    new = replace(http_runs, target=replace(http_runs.target, collection=f"{name}-new"))
    (folder / "more.txt").write_text("more about the river")
    layout = http_runs.query_store(lambda store: store.layout())
    qdrant.fail(status=503)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(aliased.run)
        qdrant.wait_for(name, lambda state: state["faults"] >= 1)
        new.query_store(lambda store: store.create(layout, Origin({}, [])))
        move_alias(f"{name}-new")
        qdrant.fail()
        assert run.result(LIMIT).uploaded == 1
    assert http_runs.query_store(lambda store: store.count(None)) == points + 1
    assert aliased.query_store(lambda store: store.count(None)) == 0


def test_collection_without_a_stored_vector_space_is_filled_only_if_empty(
    edge_runs: Runs, folder: Path
) -> None:
    edge_runs.run(kinds=frozenset({"dense"}))
    origin = edge_runs.query_store(lambda store: store.origin())
    forget_origin(edge_runs)
    (folder / "more.txt").write_text("more about the river")
    ids = edge_runs.ids()
    with pytest.raises(IngestError, match="does not say in which space its vectors are, which cou"):
        edge_runs.run(kinds=frozenset({"dense"}))
    assert edge_runs.ids() == ids
    edge_runs.query_store(lambda store: store.delete(ids))
    edge_runs.run(kinds=frozenset({"dense"}))
    assert edge_runs.query_store(lambda store: store.origin()) == origin
    # The space of a kind that the origin lacks is added.
    edge_runs.query_store(lambda store: store.set_origin(replace(origin, vector_space={})))
    edge_runs.run(kinds=frozenset({"dense"}))
    assert edge_runs.query_store(lambda store: store.origin()) == origin


def test_qdrant_that_does_not_store_metadata_is_refused(
    edge_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "smart_embedder_client.qdrant.edge_store.EdgeStore.set_origin", lambda *_: None
    )
    with pytest.raises(IngestError, match=r"does not store metadata of a collection: 1.16 does"):
        edge_runs.run()


def test_renamed_model_stores_nothing_twice(edge_runs: Runs, server: RunningServer) -> None:
    """Its folder may be renamed: the ids are made from the first names."""
    points = edge_runs.run().points
    origin = edge_runs.query_store(lambda store: store.origin())

    def rename(store: Store) -> None:
        store.delete(store.page("texts", None)[0])
        store.set_origin(replace(origin, models=["before"] * 3))

    edge_runs.query_store(rename)
    edge_runs.run()
    renamed = set(edge_runs.ids())
    assert len(renamed) == points
    edge_runs.journal.unlink()
    assert edge_runs.run().uploaded == 0


def test_foreign_metadata_is_refused() -> None:
    for metadata in (5, {"vector_space": 5}, {}):
        with pytest.raises(QdrantError, match="are not understood"):
            Origin.of_metadata({ORIGIN_KEY: metadata})
    origin = Origin({"dense": "dense-1"}, models=["a", "b", "c"])
    assert Origin.of_metadata({**origin.metadata, "yours": 2}) == origin
    assert Origin.of_metadata({"yours": 2}) is Origin.of_metadata(None) is None

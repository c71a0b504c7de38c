"""`smart-embedder check`: compare the vector space ids of collection and service."""

import json
from dataclasses import replace

import pytest
from smart_embedder_client import Client
from smart_embedder_client.ingest.check import main
from smart_embedder_client.qdrant.store import Store

from tests.client.ingest.conftest import Runs
from tests.support.server import RunningServer

KINDS = ["dense", "sparse", "colbert"]


@pytest.fixture
def check(edge_runs: Runs, capsys: pytest.CaptureFixture[str]):
    """Run the command for the collection of `edge_runs`, and return its output."""

    def run(server: RunningServer | str, *options: str, status: int = 0) -> str:
        url = server if isinstance(server, str) else server.url
        target = edge_runs.target
        where = [target.collection, "--qdrant", target.address, "--url", url]
        capsys.readouterr()
        assert main([*where, *options]) == status
        out, err = capsys.readouterr()
        return err if status == 2 else out

    return run


def read_spaces(server: RunningServer) -> dict[str, str]:
    with Client(server.url) as client:
        return client.embed(["river"], return_colbert=True).vector_space


def test_vector_space_ids_of_each_kind_are_compared(
    edge_runs: Runs, server: RunningServer, other_server: RunningServer, check
) -> None:
    edge_runs.run()
    ids, other_ids = read_spaces(server), read_spaces(other_server)
    assert check(server).splitlines() == [f"{kind}: the same space, {ids[kind]}" for kind in KINDS]
    name = edge_runs.target.collection
    command = f"smart-embedder ingest --from-collection {name}"
    assert check(other_server, status=1).splitlines() == [
        *(f"{kind}: another space, {other_ids[kind]} of the service, {ids[kind]} stored"
          for kind in KINDS),
        f"To embed the texts again: {command} --collection NEW",
    ]  # fmt: skip
    assert json.loads(check(server, "--json")) == {
        "collection": name, "stored": ids, "served": ids, "same": True,
    }  # fmt: skip
    result = json.loads(check(other_server, "--json", status=1))
    assert (result["stored"], result["served"], result["same"]) == (ids, other_ids, False)


def test_vector_space_ids_of_other_kinds_are_ignored(
    edge_runs: Runs, server: RunningServer, check
) -> None:
    edge_runs.run(kinds=frozenset({"sparse"}))
    assert check(server) == f"sparse: the same space, {read_spaces(server)['sparse']}\n"


def test_exit_status_2_if_ids_cannot_be_compared(
    edge_runs: Runs, server: RunningServer, older_server: str, closed_port: str, check, monkeypatch
) -> None:
    assert "there is no collection" in check(server, status=2)
    edge_runs.run()
    assert "as it is older" in check(older_server, status=2)
    origin = edge_runs.query_store(lambda store: store.origin())

    def note(spaces: dict[str, str]) -> None:
        def store_ids(store: Store) -> None:
            store.set_origin(replace(origin, vector_space=spaces))

        edge_runs.query_store(store_ids)

    note(origin.vector_space | {"dense": "dense-w-t-cls-none-unit-none-512end-384"})
    name = edge_runs.target.collection
    assert check(server, status=2) == (
        f"the collection {name} has long ids of an earlier version, which cannot be compared: "
        f"smart-embedder ingest --from-collection {name} --collection NEW embeds its texts again\n"
    )
    note({})
    assert "does not say in which space its vectors are" in check(server, status=2)
    note(origin.vector_space)
    monkeypatch.setattr("smart_embedder_client.ingest.check._PATIENCE", 0.1)
    assert "no connection to" in check(closed_port, status=2)

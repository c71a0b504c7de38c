"""`smart-embedder check`: compare the vector space ids of collection and service."""

import json
from dataclasses import replace

import pytest
from smart_embedder_client import Client
from smart_embedder_client.check import main

from tests.client.ingest.conftest import Runs
from tests.support.server import RunningServer

KINDS = ["dense", "sparse", "colbert"]


@pytest.fixture
def check(edge_runs: Runs, capsys: pytest.CaptureFixture[str]):
    """Run the command for the collection of `edge_runs`, and return its output."""

    def run(url: str, *options: str, status: int = 0) -> str:
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
    assert check(server.url).splitlines() == [
        f"{kind}: the same space, {ids[kind]}" for kind in KINDS
    ]
    name = edge_runs.target.collection
    command = f"smart-embedder ingest --from-collection {name}"
    assert check(other_server.url, status=1).splitlines() == [
        *(f"{kind}: another space, {other_ids[kind]} of the service, {ids[kind]} stored"
          for kind in KINDS),
        f"To embed the texts again: {command} --collection NEW",
    ]  # fmt: skip
    expected = {"collection": name, "stored": ids, "served": other_ids, "same": False}
    assert json.loads(check(other_server.url, "--json", status=1)) == expected


def test_exit_status_2_if_ids_cannot_be_compared(
    edge_runs: Runs, server: RunningServer, closed_port: str, check, monkeypatch
) -> None:
    assert "there is no collection" in check(server.url, status=2)
    edge_runs.run(kinds=frozenset({"sparse"}))
    # The kinds that the collection does not have are not compared.
    assert check(server.url) == f"sparse: the same space, {read_spaces(server)['sparse']}\n"
    monkeypatch.setattr("smart_embedder_client.calls._FIRST_PAUSE", 0.001)
    assert "no connection to" in check(closed_port, status=2)
    origin = edge_runs.query_store(lambda store: store.origin())

    def note(spaces: dict[str, str]) -> None:
        edge_runs.query_store(lambda store: store.set_origin(replace(origin, vector_space=spaces)))

    note({"sparse": "sparse-w-t-xlmr-250002"})
    name = edge_runs.target.collection
    assert check(server.url, status=2) == (
        f"the collection {name} has long ids of an earlier version, which cannot be compared: "
        f"smart-embedder ingest --from-collection {name} --collection NEW embeds its texts again\n"
    )
    note({})
    assert "that says in which space its vectors are" in check(server.url, status=2)

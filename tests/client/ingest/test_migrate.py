"""`ingest --migrate`: every text has the new vectors, and a kill at any moment loses nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from smart_embedder_client import Client
from smart_embedder_client.ingest.command import main
from smart_embedder_client.ingest.migrate import migrate
from smart_embedder_client.ingest.options import IngestError, MigrateOptions, Migration
from smart_embedder_client.qdrant.edge_store import EdgeStore
from smart_embedder_client.qdrant.store import OtherSpaceError, Point

from tests.client.ingest.conftest import Runs
from tests.support.relay import Relay
from tests.support.server import REPOSITORY, RunningServer

# A process that kills itself before, or after, the nth call of a method of its store.
KILL = """
import os, signal, sys
from smart_embedder_client.ingest.command import main
from smart_embedder_client.qdrant.edge_store import EdgeStore

method, count, when, *arguments = sys.argv[1:]
kept, left = getattr(EdgeStore, method), int(count)

def call(store, *given):
    global left
    left -= 1
    if left == 0 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    done = kept(store, *given)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return done

setattr(EdgeStore, method, call)
sys.exit(main(arguments))
"""


def migrated(runs: Runs, server: RunningServer, **options: Any) -> Migration:
    asked = MigrateOptions(patience=60.0, **options)
    return asyncio.run(migrate(asked, runs.target, server.url))


def arguments(runs: Runs, server: RunningServer, *more: str) -> list[str]:
    where = ["--qdrant", runs.target.address, "--collection", runs.target.collection]
    return ["--migrate", "--url", server.url, *where, "--no-grpc", *more]


def payloads(runs: Runs) -> dict[str, dict[str, Any]]:
    ids = runs.ids()
    points = runs.look(lambda store: store.read(ids, with_vectors=False))
    return {each.id: dict(each.payload) for each in points}


def check_vectors(runs: Runs, collection: str, server: RunningServer, expected: dict) -> None:
    """Whether a collection has these payloads by their ids, and the vectors of a service."""
    of = replace(runs, target=replace(runs.target, collection=collection))
    points = of.look(lambda store: store.read(list(expected), with_vectors=True))
    assert of.look(lambda store: store.count(None)) == len(expected)
    assert {each.id: dict(each.payload) for each in points} == expected
    texts = [each.payload["text"] for each in points]
    with Client(server.url) as client:
        made = client.embed_documents(texts, return_colbert=True)
    for i, each in enumerate(points):
        np.testing.assert_allclose(each.vectors.dense, made.dense[i], atol=1e-5)
        np.testing.assert_allclose(each.vectors.colbert, made.colbert[i], atol=1e-5)
        found, wanted = each.vectors.sparse.as_dict(), made.sparse[i].as_dict()
        assert found == pytest.approx(wanted, abs=1e-5)
    origin = of.look(lambda store: store.origin())
    assert origin.vector_space == made.vector_space
    assert origin.is_complete


def names(runs: Runs) -> list[str]:
    return runs.look(lambda store: sorted(store.names()))


def test_a_collection_makes_room_for_an_alias_and_an_alias_is_moved(
    runs: Runs, server: RunningServer, other_server: RunningServer
) -> None:
    """A whole life: kept, replaced, moved back, and dropped; later runs find their points."""
    runs.run()
    name, before = runs.target.collection, payloads(runs)
    kept = migrated(runs, other_server)
    assert (kept.uploaded, kept.is_moved, kept.is_dropped) == (len(before), False, False)
    assert kept.new.startswith(f"{name}-")
    check_vectors(runs, name, server, before)
    check_vectors(runs, kept.new, other_server, before)

    replaced = migrated(runs, other_server, drop_old=True)
    assert (replaced.new, replaced.uploaded) == (kept.new, 0)
    assert (replaced.is_moved, replaced.is_dropped) == (True, True)
    check_vectors(runs, name, other_server, before)
    assert replace(runs, url=other_server.url).run().uploaded == 0

    back = migrated(runs, server)
    assert (back.old, back.is_moved, back.is_dropped) == (kept.new, True, False)
    check_vectors(runs, name, server, before)
    check_vectors(runs, kept.new, other_server, before)
    again = migrated(runs, server, drop_old=True)
    assert (again.uploaded, again.is_dropped) == (0, True)
    assert set(names(runs)) >= {back.new}
    assert kept.new not in names(runs)
    assert runs.run().uploaded == 0


def test_a_kill_at_any_step_loses_nothing(
    edge_runs: Runs, server: RunningServer, other_server: RunningServer, folder: Path
) -> None:
    """Of a collection that is replaced by an alias, and of the alias, which is moved back.

    Each run goes on from where the one before it was killed.
    """
    rows = [json.dumps({"text": f"row {i} of the river " * 5, "row": i}) for i in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    edge_runs.run()
    before = payloads(edge_runs)
    stores = ["upsert 1 before", "upsert 2 after", "note_origin 1 before"]
    replaces = ["drop 1 before", "move_alias 1 before", "move_alias 1 after"]
    for then, kills in (
        (other_server, [*stores, *replaces]),
        (server, ["move_alias 1 before", "drop 1 before"]),
    ):
        asked = arguments(edge_runs, then, "--streams", "1", "--requests", "1", "--drop-old")
        for kill in kills:
            killed = subprocess.run(
                [sys.executable, "-c", KILL, *kill.split(), *asked],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY / "client" / "src")},
                timeout=120,
                check=False,
            )
            assert killed.returncode == -signal.SIGKILL, kill
        assert main(asked) == 0
        check_vectors(edge_runs, edge_runs.target.collection, then, before)
        assert len(names(edge_runs)) == 1
        assert replace(edge_runs, url=then.url).run().uploaded == 0


def test_what_changes_meanwhile_is_found_by_the_next_run(
    edge_runs: Runs, other_server: RunningServer, folder: Path
) -> None:
    edge_runs.run()
    new = migrated(edge_runs, other_server).new
    (folder / "lid.txt").write_text("Another text about winter.")
    edge_runs.run(sync=True)
    assert migrated(edge_runs, other_server).uploaded == 1
    check_vectors(edge_runs, new, other_server, payloads(edge_runs))


def test_a_service_that_is_changed_under_it_stops_it(
    edge_runs: Runs,
    server: RunningServer,
    other_server: RunningServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "long.txt").write_text(" ".join(f"row {i} of the river." for i in range(300)))
    edge_runs.run()
    upsert = EdgeStore.upsert
    with Relay() as relay:
        relay.connect_to(other_server.url)

        def change_service(store: EdgeStore, points: list[Point]) -> None:
            upsert(store, points)
            relay.disconnect()
            relay.connect_to(server.url)

        monkeypatch.setattr(EdgeStore, "upsert", change_service)
        options = MigrateOptions(patience=60.0, requests=1)
        with pytest.raises(OtherSpaceError, match="has changed during the run: run the same comm"):
            asyncio.run(migrate(options, edge_runs.target, relay.url))


def test_vectors_may_get_another_type_and_fewer_kinds_in_the_same_space(
    edge_runs: Runs, server: RunningServer
) -> None:
    edge_runs.run()
    done = migrated(edge_runs, server, datatype="float16", kinds=frozenset({"dense"}))
    new = replace(edge_runs, target=replace(edge_runs.target, collection=done.new))
    layout = new.look(lambda store: store.layout())
    assert (layout.kinds, layout.datatype) == ({"dense"}, "float16")
    assert len(new.ids()) == done.uploaded == len(edge_runs.ids())
    changed = {"kinds": frozenset({"sparse", "colbert"}), "colbert_pool_factor": 2}
    for _ in range(2):
        pooled = migrated(edge_runs, server, drop_old=True, **changed)
        assert pooled.is_moved
    assert pooled.uploaded == 0
    assert edge_runs.look(lambda store: store.layout()).kinds == changed["kinds"]
    assert migrated(edge_runs, server).uploaded == 0


def test_a_point_without_a_text_is_named_and_the_name_stays(
    edge_runs: Runs, other_server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    edge_runs.run(kinds=frozenset({"sparse"}))
    (name, *_) = edge_runs.ids()
    (first,) = edge_runs.look(lambda store: store.read([name], with_vectors=True))
    bare = replace(first, payload={"dataset": "texts", "source": "by hand"})
    edge_runs.look(lambda store: store.upsert([bare]))
    asked = arguments(edge_runs, other_server, "--drop-old")
    assert main(asked) == 1
    told = capsys.readouterr().out
    assert "by hand: it has no text that could be embedded anew\n" in told
    name = edge_runs.target.collection
    assert told.splitlines()[-1].startswith(f"{name} stays as it is until {name}-")
    edge_runs.look(lambda store: store.delete([bare.id]))
    assert main(asked) == 0
    assert f"{name} is an alias of {name}-" in capsys.readouterr().out


def test_nothing_is_migrated_to_the_same_space_or_to_an_unknown_one(
    edge_runs: Runs, server: RunningServer, older_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(IngestError, match="there is no collection"):
        migrated(edge_runs, server)
    edge_runs.run()
    assert main(arguments(edge_runs, server)) == 0
    assert "has the service's vectors already: nothing is to be migrated" in capsys.readouterr().out
    assert names(edge_runs) == [edge_runs.target.collection]
    (index,) = (i for i, each in enumerate(arguments(edge_runs, server)) if each == "--url")
    older = arguments(edge_runs, server)
    older[index + 1] = older_server
    assert main(older) == 1
    assert "so there is nothing to migrate to.\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "the following arguments are required: SOURCE"),
        (["texts", "--drop-old"], "--drop-old is for --migrate"),
        (["texts", "--migrate"], "whatever their source: leave out SOURCE"),
        (["--migrate", "--chunk-tokens", "9"], "whatever their source: leave out --chunk-tokens"),
        (["--migrate", "--sync"], "whatever their source: leave out --sync"),
    ],
)
def test_options_that_do_not_belong_together(options: list[str], told: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--collection", "texts", *options])
    assert told in capsys.readouterr().err

"""After kill -9 of the run or the service, all points are stored once."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.client.ingest.conftest import Runs, is_stored_once
from tests.support.checkpoints import WORDS
from tests.support.qdrant.process import QdrantServer
from tests.support.relay import Relay
from tests.support.server import run_server
from tests.support.waiting import LIMIT

CHUNKS = 400


@pytest.fixture
def rows(http_runs: Runs, tmp_path: Path) -> Runs:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"{i} {WORDS[i % len(WORDS)]}"}) for i in range(CHUNKS)]
    path.write_text("\n".join(lines))
    return replace(http_runs, options=replace(http_runs.options, source=path))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_run_is_resumed(rows: Runs, qdrant: QdrantServer, after: bool) -> None:
    """The run is killed during an upload, before or after Qdrant has stored it."""
    name = rows.target.collection
    qdrant.fail(text="399 ", seconds=600.0, after=after, status=503)
    with rows.started() as run:
        qdrant.wait_for(name, lambda state: state["faults"] == 1)
        run.kill()
        run.wait(LIMIT)
        # Other uploads that were sent are stored by now.
        qdrant.wait_for(name, lambda state: state["streams"] == state["requests"] == 1)
    qdrant.fail()
    stored = len(qdrant.state(name)["uploads"])
    assert rows.run().uploaded == CHUNKS - stored
    assert is_stored_once(rows, qdrant, CHUNKS)
    assert rows.run().uploaded == 0


def test_ctrl_c_does_not_wait_for_qdrant(rows: Runs, qdrant: QdrantServer) -> None:
    qdrant.fail(seconds=600.0, status=503)
    with rows.started("--qdrant-timeout", "3600") as run:
        qdrant.wait_for(rows.target.collection, lambda state: state["faults"] >= 1)
        run.send_signal(signal.SIGINT)
        _, notes = run.communicate(timeout=LIMIT)
    assert run.returncode == 130
    assert notes.splitlines()[-1] == "Interrupted. The same command goes on from here."
    qdrant.fail()
    assert rows.run().points == CHUNKS


def test_run_waits_for_a_restarted_service(
    rows: Runs, qdrant: QdrantServer, tiny_m3: Path, tmp_path: Path
) -> None:
    with Relay() as relay:
        runs = replace(rows, url=relay.url)
        # The service is killed before anything is stored, so the run needs it again.
        qdrant.fail(status=503)
        with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3)) as service:
            relay.connect_to(service.url)
            with runs.started("--requests", "1", "--json") as process:
                qdrant.wait_for(rows.target.collection, lambda state: state["faults"] >= 1)
                service.process.kill()
                service.process.wait(LIMIT)
                relay.port = None
                qdrant.fail()
                with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3)) as again:
                    relay.connect_to(again.url)
                    printed, notes = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, notes
    assert json.loads(printed)["uploaded"] == CHUNKS
    assert is_stored_once(rows, qdrant, CHUNKS)

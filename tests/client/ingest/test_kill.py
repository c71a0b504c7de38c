"""After a kill of the run, or while the service is away, all points are stored once."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.client.ingest.conftest import Runs, is_stored_once
from tests.support.checkpoints import WORDS
from tests.support.qdrant.process import QdrantServer
from tests.support.relay import Relay
from tests.support.waiting import LIMIT, wait_until

CHUNKS = 300


@pytest.fixture
def rows(http_runs: Runs, tmp_path: Path) -> Runs:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"{i} {WORDS[i % len(WORDS)]}"}) for i in range(CHUNKS)]
    path.write_text("\n".join(lines))
    return replace(http_runs, options=replace(http_runs.options, source=path))


@pytest.mark.parametrize(
    ("after", "sent", "status"),
    [(True, signal.SIGKILL, -signal.SIGKILL), (False, signal.SIGINT, 130)],
    ids=["killed after", "interrupted before"],
)
def test_ended_run_is_resumed(
    rows: Runs, qdrant: QdrantServer, after: bool, sent: signal.Signals, status: int
) -> None:
    """The run ends during an upload, before or after Qdrant has stored it."""
    name = rows.target.collection
    qdrant.fail(text=f"{CHUNKS - 1} ", seconds=600.0, after=after, status=503)
    with rows.started("--qdrant-timeout", "3600") as run:
        qdrant.wait_for(name, lambda state: state["faults"] == 1)
        run.send_signal(sent)
        _, notes = run.communicate(timeout=LIMIT)
        assert run.returncode == status
        if sent == signal.SIGINT:
            assert notes == "Interrupted. The same command goes on from here.\n"
        # Other uploads that were sent are stored by now.
        qdrant.wait_for(name, lambda state: state["streams"] == state["requests"] == 1)
    qdrant.fail()
    stored = len(qdrant.state(name)["uploads"])
    assert rows.run().uploaded == CHUNKS - stored
    assert is_stored_once(rows, qdrant, CHUNKS)
    assert rows.run().uploaded == 0


def test_run_waits_for_a_service_that_is_away(rows: Runs, qdrant: QdrantServer) -> None:
    with Relay() as relay, ThreadPoolExecutor(1) as threads:
        relay.connect_to(rows.url)
        # The service goes away before anything is stored, so the run needs it again.
        qdrant.fail(status=503)
        run = threads.submit(replace(rows, url=relay.url).run, requests=1)
        qdrant.wait_for(rows.target.collection, lambda state: state["faults"] >= 1)
        relay.disconnect()
        qdrant.fail()
        wait_until(lambda: relay.refused, "the run has not asked the service again")
        relay.connect_to(rows.url)
        assert run.result(LIMIT).uploaded == CHUNKS
    assert is_stored_once(rows, qdrant, CHUNKS)

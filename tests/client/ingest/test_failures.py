"""If Qdrant is slow, full, away, or refuses a point, the run goes on or can be resumed."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from qdrant_client import QdrantClient
from smart_embedder_client import SmartEmbedderError
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.journal import Journal
from smart_embedder_client.qdrant.store import QdrantBusyError, QdrantError, QdrantFullError, Target

from tests.client.ingest.conftest import Runs, is_stored_once
from tests.support.qdrant.process import QdrantServer

NO_SPACE = "Service internal error: No space left on device: WAL buffer size exceeds disk space"


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 429, "headers": {"Retry-After": "1"}},
        {"status": 503, "after": True},
        {"status": 500, "reason": "Service internal error: task 3 panicked"},
        {"seconds": 3.0},
    ],
)
def test_requests_to_a_busy_or_slow_qdrant_are_retried(
    http_runs: Runs, qdrant: QdrantServer, fault: dict, capsys: pytest.CaptureFixture
) -> None:
    qdrant.fail(**{"times": 1} | fault)
    target = replace(http_runs.target, timeout=1 if "seconds" in fault else 60)
    report = replace(http_runs, target=target).run()
    assert len(http_runs.ids()) == report.points
    # Points of requests that timed out or got no response are stored, too.
    assert {"seconds", "after"} & {*fault} or is_stored_once(http_runs, qdrant, report.points)
    tries = capsys.readouterr().err.count("trying again")
    # On a loaded machine other requests may take a second, too.
    assert tries == 1 or (tries > 1 and "seconds" in fault)
    assert http_runs.run().uploaded == 0


def test_full_disk_507_stops_the_run_which_can_be_resumed(
    http_runs: Runs, qdrant: QdrantServer
) -> None:
    options = replace(http_runs.options, batch_bytes=1, streams=1)
    runs = replace(http_runs, options=options)
    qdrant.fail(text="Paragraph 8", status=507)
    with pytest.raises(QdrantFullError) as caught:
        runs.run()
    assert "\n" not in str(caught.value)
    stored = len(runs.ids())
    qdrant.fail()
    report = runs.run()
    assert report.points == report.uploaded + stored
    assert stored > 0
    assert is_stored_once(runs, qdrant, report.points)


@pytest.mark.parametrize(
    ("runs", "full", "away", "refusing", "refuses"),
    [
        ("http", 500, 503, 400, 400),
        ("grpc", "INTERNAL", "UNAVAILABLE", 422, "INVALID_ARGUMENT"),
    ],
    indirect=["runs"],
)
def test_qdrant_errors_are_alike_over_http_and_grpc(
    runs: Runs, qdrant: QdrantServer, full: object, away: object, refusing: int, refuses: object
) -> None:
    qdrant.fail(status=500, reason=NO_SPACE)
    with pytest.raises(QdrantFullError, match=f"answers {full}: .*No space left"):
        runs.run()
    qdrant.fail(status=503)
    with pytest.raises(QdrantBusyError, match=f"answers {away}: a fault set by the test"):
        runs.run(patience=0.1)
    # A refused point is reported, and the others are stored.
    qdrant.fail(status=refusing, reason="the vector is odd", text="pump is blocked")
    report = runs.run()
    ((source, reason),) = report.refused
    assert source == "pump.txt"
    assert f"answers {refuses}: the vector is odd" in reason
    assert is_stored_once(runs, qdrant, report.points - 1)
    with Journal(runs.journal) as journal:
        assert journal.points == report.points - 1
    # Only the refused point is sent again.
    assert runs.run().refused == report.refused
    qdrant.fail(status=429, times=1)
    last = runs.run()
    assert (last.uploaded, last.refused) == (1, [])
    assert is_stored_once(runs, qdrant, report.points)


def test_run_stops_after_too_many_refused_points(
    http_runs: Runs, qdrant: QdrantServer, folder: Path
) -> None:
    for i in range(101):
        (folder / f"{i:03}.txt").write_text(f"river {i}")
    qdrant.fail(status=422)
    with pytest.raises(IngestError, match="more than 100 chunks were refused: .* 422"):
        http_runs.run()


def test_uploads_keep_the_limits_of_bytes_and_streams(
    http_runs: Runs, qdrant: QdrantServer, folder: Path
) -> None:
    for i in range(60):
        (folder / f"{i:03}.txt").write_text(f"{i} " + "river winter " * 18)
    # A point of these texts has about 30 KB of JSON.
    report = http_runs.run(batch_bytes=200_000, streams=3)
    state = qdrant.state(http_runs.target.collection)
    assert is_stored_once(http_runs, qdrant, report.points)
    assert 30_000 < state["largest_upload"] <= 200_000
    assert state["most_streams"] <= 3


def test_hnsw_graph_is_built_at_the_end(http_runs: Runs, qdrant: QdrantServer) -> None:
    def edges() -> list[int]:
        with closing(QdrantClient(qdrant.url, check_compatibility=False)) as client:
            config = client.get_collection(http_runs.target.collection).config
        return [config.params.vectors[kind].hnsw_config.m for kind in ("dense", "colbert")]

    qdrant.fail(status=507)
    with pytest.raises(QdrantFullError):
        http_runs.run()
    qdrant.fail()
    http_runs.run(index=False)
    assert edges() == [0, 0]
    http_runs.run()
    assert edges() == [16, 0]


def test_unreachable_or_wrong_server_is_reported(edge_runs: Runs, closed_port: str) -> None:
    nowhere = replace(edge_runs, url=closed_port)
    with pytest.raises(SmartEmbedderError, match="no connection to"):
        nowhere.run(patience=0.1)
    target = Target(closed_port, "texts", use_grpc=False)
    with pytest.raises(QdrantBusyError, match="no connection to Qdrant at"):
        replace(edge_runs, target=target).run(patience=0.1)
    target = Target(edge_runs.url, "texts", use_grpc=False)
    with pytest.raises(QdrantError, match="answers 404"):
        replace(edge_runs, target=target).run(patience=0.1)

"""Progress of a run, with a simulated clock."""

import pytest
from smart_embedder_client.ingest.pace import Progress


def test_progress_line_per_minute_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    with Progress("texts", "B", clock=lambda: now) as progress:
        progress.expect(10_000)
        # An earlier run has stored 90 %, which this run finds out in 50 seconds.
        for _ in range(9):
            progress.skip(1_000)
        now = 50.0
        progress.skip(0)
        for _ in range(12):
            now += 10.0
            progress.store(5)
            progress.read(10)
        assert capsys.readouterr().err.splitlines() == [
            "90% read, 5 chunks stored, 0.5 chunks/s",
            # 60 of the last 1,000 bytes took 70 seconds.
            "91% read, 35 chunks stored, 0.5 chunks/s, 18:16 left",
        ]

"""Progress of a run, with a simulated clock."""

import pytest
from smart_embedder_client.ingest.pace import Progress


def test_progress_line_per_minute_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    with Progress("texts", "B") as progress:
        progress.expect(1_000)
        for _ in range(13):
            now += 10.0
            progress.store(5)
            progress.advance(50)
    assert capsys.readouterr().err.split("\n")[:2] == [
        "\rtexts:  30%|[01:00<02:20, 30 chunks stored, 0.5 chunks/s]",
        "\rtexts:  60%|[02:00<01:20, 60 chunks stored, 0.5 chunks/s]",
    ]

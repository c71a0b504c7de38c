"""`smart-embedder ingest`: output, exit status and progress bar."""

import io
import json
import sys
from contextlib import closing
from dataclasses import replace

import pytest
from smart_embedder_client import cli
from smart_embedder_client.ingest.command import main
from smart_embedder_client.ingest.journal import Journal
from smart_embedder_client.ingest.options import IngestOptions, Report
from smart_embedder_client.qdrant import open_store

from tests.client.ingest.conftest import Runs
from tests.support.qdrant.process import QdrantServer


def test_report_is_printed(edge_runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(edge_runs.arguments()) == 0
    out, err = capsys.readouterr()
    assert out.endswith("0 there already, 0 removed\n")
    # No progress bar without a terminal.
    assert err == ""
    assert main(edge_runs.arguments("--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["documents"], report["uploaded"], report["refused"]) == (3, 0, [])
    (edge_runs.options.source / "lid.txt").unlink()
    assert main(edge_runs.arguments()) == 0
    assert "1 points are of sources that are gone or have changed: --sync removes them" in (
        capsys.readouterr().out
    )


def test_exit_status_1_if_qdrant_refuses_points_or_is_full(
    http_runs: Runs, qdrant: QdrantServer, capsys: pytest.CaptureFixture[str]
) -> None:
    qdrant.fail(status=422, text="pump is blocked")
    assert main(http_runs.arguments()) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("pump.txt: Qdrant at ")
    assert lines[2] == "1 chunks were refused; the same command tries them again"
    qdrant.fail(status=507, reason="no space left")
    assert main(http_runs.arguments()) == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert message == (
        f"Qdrant at {http_runs.target.address} answers 507: no space left. "
        "The same command goes on from here."
    )


def test_skipped_and_unreadable_files_are_reported(
    edge_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edge_runs.options.source
    for name in ("a.png", "b.png", "LICENSE"):
        (folder / name).write_text("a")
    assert main(edge_runs.arguments()) == 0
    assert "not read: 2 .png, 1 without an ending\n" in capsys.readouterr().out
    (folder / "a.txt").write_bytes(b"caf\xe9")
    (folder / "evil\x1b[2J.txt").write_bytes(b"\xff")
    (folder / "lid.txt").unlink()
    assert main(edge_runs.arguments("--sync")) == 1
    out = capsys.readouterr().out
    assert ": 0 stored, " in out
    assert " there already, 0 removed\n" in out
    assert (
        "1 points are of sources that are gone or have changed: nothing is removed before all is"
        in out
    )
    assert f"2 files or folders could not be read:\n  {folder}/a.txt is not UTF-8: " in out
    assert f"  {folder}/evil [2J.txt is not UTF-8" in out
    assert main(edge_runs.arguments("--json")) == 1
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["unread"] == {".png": 2, "without an ending": 1}
    assert [name for name, _ in report["failed"]] == ["a.txt", "evil\x1b[2J.txt"]
    assert "\x1b" not in out


def test_exit_status_1_if_nothing_was_read(
    edge_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edge_runs.options.source
    main(edge_runs.arguments())
    capsys.readouterr()
    for file in folder.iterdir():
        file.rename(file.with_suffix(".png"))
    assert main(edge_runs.arguments("--sync")) == 1
    out, err = capsys.readouterr()
    assert ("0 removed" in out, "not read: 3 .png" in out) == (True, True)
    assert err == f"Nothing was read: {folder} has no text.\n"
    assert main(["/no/such/file", *edge_runs.arguments()[1:]]) == 1
    # Running the same command again would not help.
    assert capsys.readouterr().err == "/no/such/file does not exist.\n"


def test_progress_bar_on_a_terminal_shows_the_rate(
    edge_runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main(edge_runs.arguments()) == 0
    shown = sys.stderr.getvalue()
    assert "texts by Qdrant Edge: 100%|" in shown
    assert "chunks/s" in shown


def test_folder_or_journal_in_use_is_reported(
    edge_runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    edge_runs.run()
    other = replace(edge_runs, journal=edge_runs.journal.with_name("other"))
    with closing(open_store(edge_runs.target)):
        assert main(other.arguments()) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "open in another process" in err
    with Journal(edge_runs.journal):
        assert main(edge_runs.arguments()) == 1
    assert "another run has it open.\n" in capsys.readouterr().err
    assert edge_runs.run().uploaded == 0


def test_options_reach_the_run(edge_runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[IngestOptions] = []

    async def take(options: IngestOptions, *_: object) -> Report:
        given.append(options)
        return Report(documents=1)

    monkeypatch.setattr("smart_embedder_client.ingest.command.ingest", take)
    more = ["--overlap", "0", "--no-index", "--kinds", "dense", "--patience", "60"]
    assert main(edge_runs.arguments(*more)) == 0
    assert given == [replace(edge_runs.options, overlap=0, index=False, kinds=frozenset({"dense"}))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kinds", "colbert"], "colbert is no list of dense, sparse, colbert with dense or"),
        (["--chunk-tokens", "0"], "0 is less than 1"),
        (["--overlap", "-1"], "-1 is less than 0"),
        (["--datatype", "int4"], "invalid choice"),
        (["--encoding", "hex"], "hex is no encoding that Python knows"),
        (["--url", "localhost:8000"], "'localhost:8000' is no address such as http://"),
        (["--token", "secret\n"], "the token has a character that no header can have"),
        (["--url", "http://127.0.0.1/v1"], "has /v1, which OpenAI's clients need"),
    ],
)
def test_invalid_option_is_named(
    edge_runs: Runs, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(edge_runs.arguments(*options))
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client may be installed without its extra."""
    monkeypatch.delitem(sys.modules, "smart_embedder_client.ingest.command")
    monkeypatch.setitem(sys.modules, "smart_embedder_client.ingest.run", None)
    monkeypatch.setattr(sys, "argv", ["smart-embedder", "ingest"])
    message = 'ingest needs .*: pip install "smart-embedder-client.qdrant."'
    with pytest.raises(SystemExit, match=message):
        cli.main()


def test_unknown_command_prints_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["smart-embedder", "digest"])
    with pytest.raises(SystemExit, match="usage: smart-embedder ingest SOURCE"):
        cli.main()

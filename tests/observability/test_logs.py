"""How the log looks and what is left out of it; what clients can write into it, and how often."""

import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from smart_embedder.observability import logs
from smart_embedder.observability.logs import SampledLog, configure_logs, escape_text

UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access")
LIBRARIES = ("httpx", "httpx2", "urllib3", "asyncio", "uvicorn.access")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Put back what a test configures for the whole process."""
    root = logging.getLogger()
    loggers = {name: logging.getLogger(name) for name in {*UVICORN, *LIBRARIES, "acme"}}
    levels = {name: each.level for name, each in loggers.items()}
    before, level, configured = root.handlers[:], root.level, structlog.get_config()
    for each in loggers.values():  # Another test may have run a server in this process.
        each.setLevel(logging.NOTSET)
    yield
    root.handlers[:], root.level = before, level
    for name, each in loggers.items():
        each.setLevel(levels[name])
    logging.getLogger("uvicorn.error").filters.clear()
    structlog.configure(**configured)


def written(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_events_and_libraries_lines_are_json_objects_of_one_form(capsys) -> None:
    configure_logs("json", "info")
    structlog.contextvars.bind_contextvars(request_id="r1")
    structlog.get_logger("app").info("started", port=8000, path=logging)
    logging.getLogger("acme").warning("disk %s", "full")
    structlog.contextvars.clear_contextvars()
    ours, theirs = written(capsys)
    assert (ours["event"], ours["level"], ours["port"]) == ("started", "info", 8000)
    assert ours["path"] == str(logging)
    assert (theirs["event"], theirs["level"]) == ("disk full", "warning")
    for line in (ours, theirs):
        assert line["request_id"] == "r1"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", str(line["timestamp"]))
        assert not {"_record", "_from_structlog"} & set(line)


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_is_written_and_no_variable_of_its_frames(log_format: str, capsys) -> None:
    configure_logs(log_format, "info")
    secret = "hush"
    try:
        _ = [][len(secret)]
    except IndexError:
        structlog.get_logger("app").exception("failed")
    text = capsys.readouterr().err
    assert "Traceback (most recent call last)" in text
    assert "IndexError: list index out of range" in text
    assert text.count("hush") == text.count('secret = "hush"')
    if log_format == "json":
        assert "IndexError: list index out of range" in json.loads(text)["exception"]


def test_the_console_gets_lines_without_colours_where_it_is_none(capsys) -> None:
    configure_logs("console", "info")
    structlog.get_logger("app").warning("queue_full", waiting=3)
    text = capsys.readouterr().err
    assert re.search(r"\[warning *\] queue_full +waiting=3\n$", text)
    assert "\x1b" not in text


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_what_is_below_the_level_is_not_written(level: str, capsys) -> None:
    configure_logs("json", level)
    names = ["debug", "info", "warning", "error"]
    for name in names:
        getattr(structlog.get_logger("app"), name)("ours")
        for logger in ("acme", *LIBRARIES):
            getattr(logging.getLogger(logger), name)(logger)
    lines = [(line["event"], line["level"]) for line in written(capsys)]
    shown = names[names.index(level) :]
    for event in ("ours", "acme", *LIBRARIES):
        # Libraries that tell of every request write warnings alone.
        expected = shown if event in {"ours", "acme"} else [*{"warning", "error"} & {*shown}]
        assert sorted(each for name, each in lines if name == event) == sorted(expected)


@pytest.mark.parametrize(
    ("level", "server_at", "lines"),
    [
        ("info", None, [("failed", "error")]),
        ("info", "debug", [("failed", "error")]),
        ("debug", "debug", [("listening", "debug"), ("failed", "error")]),
        ("info", "info", [("listening", "info"), ("failed", "error")]),
        ("error", "info", [("failed", "error")]),
    ],
)
def test_the_servers_own_lines_are_at_the_level_that_is_asked_for(
    level: str, server_at: str | None, lines: list[tuple[str, str]], capsys
) -> None:
    for name in UVICORN:
        logging.getLogger(name).addHandler(logging.StreamHandler(sys.stderr))
        logging.getLogger(name).propagate = False
    configure_logs("json", "debug")  # What comes later takes its place.
    configure_logs("json", level, **({} if server_at is None else {"server_at": server_at}))
    logging.getLogger("uvicorn.error").info("listening")
    logging.getLogger("uvicorn.error").error("failed")
    assert [(line["event"], line["level"]) for line in written(capsys)] == lines


def test_a_clients_text_cannot_end_a_line_move_the_cursor_or_turn_the_writing() -> None:
    assert escape_text("a\nb\x1b[2J\u202ec") == "a\\nb\\x1b[2J\\u202ec"
    assert escape_text("ß 漢") == "ß 漢"
    assert escape_text("x" * 1000) == "x" * 200
    assert escape_text("a\n" * 3, 3) == "a\\na"


@pytest.mark.parametrize("seconds", [10.0, 64.0])
def test_an_event_that_repeats_is_logged_once_in_a_while_and_the_rest_counted(
    seconds: float, monkeypatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    log = SampledLog() if seconds == 10 else SampledLog(seconds)
    with capture_logs() as lines:
        for number in range(3):
            log.warning("malformed", number=number)
        log.warning("another")
        now += seconds - 0.5
        log.warning("malformed", number=3)
        now += 0.5
        log.warning("malformed", number=4)
        log.warning("malformed", number=5)
        now += 2 * seconds
        log.warning("malformed", number=6)
    seen = [(line["event"], line.get("number"), line["left_out"]) for line in lines]
    assert seen == [
        ("malformed", 0, 0),
        ("another", None, 0),
        ("malformed", 4, 3),
        ("malformed", 6, 1),
    ]
    assert {line["log_level"] for line in lines} == {"warning"}

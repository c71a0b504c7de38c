"""The form of the log, what it leaves out, and what clients can write into it."""

import fcntl
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from app import logs
from app.logs import (
    LogWriter,
    SampledLog,
    configure_logs,
    escape_text,
    lines_dropped,
    print_beside_log,
)
from tests.support.script import run_script
from tests.support.waiting import wait_until

UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs pipes of a chosen size")
LIBRARIES = ("httpx", "httpx2", "urllib3", "asyncio", "uvicorn.access")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restore the logging of the process after a test."""
    root = logging.getLogger()
    loggers = {name: logging.getLogger(name) for name in {*UVICORN, *LIBRARIES, "acme"}}
    levels = {name: logger.level for name, logger in loggers.items()}
    before, level, configured = root.handlers[:], root.level, structlog.get_config()
    for logger in loggers.values():  # Another test may have run a server in this process.
        logger.setLevel(logging.NOTSET)
    yield
    for handler in root.handlers:
        if isinstance(handler, LogWriter):
            handler.close()
    root.handlers[:], root.level = before, level
    for name, logger in loggers.items():
        logger.setLevel(levels[name])
    logging.getLogger("uvicorn.error").filters.clear()
    structlog.configure(**configured)


def text_in_log(capfd: pytest.CaptureFixture[str]) -> str:
    for handler in logging.getLogger().handlers:
        handler.flush()
    return capfd.readouterr().err


def written(capfd: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in text_in_log(capfd).splitlines()]


def test_events_and_records_of_libraries_are_json_objects_of_one_form(capfd) -> None:
    configure_logs("json", "info")
    structlog.contextvars.bind_contextvars(request_id="r1")
    structlog.get_logger("app").info("started", port=8000, path=logging)
    logging.getLogger("acme").warning("disk %s", "full")
    structlog.contextvars.clear_contextvars()
    ours, theirs = written(capfd)
    assert (ours["event"], ours["level"], ours["port"]) == ("started", "info", 8000)
    assert ours["path"] == str(logging)
    assert (theirs["event"], theirs["level"]) == ("disk full", "warning")
    for line in (ours, theirs):
        assert line["request_id"] == "r1"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", str(line["timestamp"]))
        assert not {"_record", "_from_structlog"} & set(line)


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_is_logged_without_local_variables(log_format: str, capfd) -> None:
    configure_logs(log_format, "info")
    secret = "hush"
    try:
        _ = [][len(secret)]
    except IndexError:
        structlog.get_logger("app").exception("failed")
    text = text_in_log(capfd)
    assert "Traceback (most recent call last)" in text
    assert "IndexError: list index out of range" in text
    assert text.count("hush") == text.count('secret = "hush"')
    if log_format == "json":
        assert "IndexError: list index out of range" in json.loads(text)["exception"]


def test_the_log_has_no_colours_unless_it_is_a_terminal(capfd) -> None:
    configure_logs("console", "info")
    structlog.get_logger("app").warning("queue_full", waiting=3)
    text = text_in_log(capfd)
    assert re.search(r"\[warning *\] queue_full +waiting=3\n$", text)
    assert "\x1b" not in text


@pytest.mark.parametrize("level", ["debug", "warning"])
def test_events_below_the_log_level_are_not_written(level: str, capfd) -> None:
    configure_logs("json", level)
    names = ["debug", "info", "warning", "error"]
    for name in names:
        getattr(structlog.get_logger("app"), name)("ours")
        for logger in ("acme", *LIBRARIES):
            getattr(logging.getLogger(logger), name)(logger)
    lines = [(line["event"], line["level"]) for line in written(capfd)]
    shown = names[names.index(level) :]
    for event in ("ours", "acme", *LIBRARIES):
        # Of libraries that log every request, only warnings are written.
        expected = shown if event in {"ours", "acme"} else [*{"warning", "error"} & {*shown}]
        assert sorted(logged for name, logged in lines if name == event) == sorted(expected)


@pytest.mark.parametrize(
    ("level", "server_at", "lines"),
    [
        ("info", "debug", [("failed", "error")]),
        ("debug", "debug", [("listening", "debug"), ("failed", "error")]),
        ("info", "info", [("listening", "info"), ("failed", "error")]),
    ],
)
def test_uvicorns_info_lines_are_logged_at_server_at(
    level: str, server_at: str, lines: list[tuple[str, str]], capfd
) -> None:
    for name in UVICORN:
        logging.getLogger(name).addHandler(logging.StreamHandler(sys.stderr))
        logging.getLogger(name).propagate = False
    configure_logs("json", "debug")  # The later handler replaces it.
    configure_logs("json", level, server_at=server_at)
    logging.getLogger("uvicorn.error").info("listening")
    logging.getLogger("uvicorn.error").error("failed")
    assert [(line["event"], line["level"]) for line in written(capfd)] == lines


# A stalled reader of the log.


def dropped() -> int:
    (family,) = lines_dropped.collect()
    return int(family.samples[0].value)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The pipe of the log, of the smallest size, with no reader."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    monkeypatch.setattr(logs, "_STDERR", writes)
    monkeypatch.setattr(logs, "_MAX_LINES", 5)
    yield reads, writes
    os.close(reads)
    os.close(writes)


@linux_only
def test_log_lines_are_dropped_and_counted_while_the_reader_stalls(pipe) -> None:
    reads, writes = pipe
    os.write(writes, b" " * 4095 + b"\n")  # The pipe is full from the start.
    configure_logs("json", "info")
    (writer,) = logging.getLogger().handlers
    assert isinstance(writer, LogWriter)
    log, before = structlog.get_logger("app"), dropped()
    log.info("before", number=0)
    wait_until(writer._lines.empty, "the first line was never taken")
    for number in range(1, 20):  # None of these calls waits for the reader.
        log.info("before", number=number)
    assert dropped() - before == 14
    lines: list[dict[str, Any]] = []

    def read() -> None:
        with os.fdopen(os.dup(reads)) as stream:
            stream.readline()
            while not lines or lines[-1]["event"] != "after":
                lines.append(json.loads(stream.readline()))

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(writer._lines.empty, "the lines were never read")
    log.info("after")
    thread.join()
    assert [line.get("number") for line in lines] == [0, 1, 2, 3, 4, 5, None, None]
    assert [line["event"] for line in lines[-2:]] == ["log_lines_dropped", "after"]
    assert lines[-2]["count"] == 14


@linux_only
def test_flush_waits_only_once_for_a_stalled_reader(pipe, monkeypatch) -> None:
    reads, _ = pipe
    configure_logs("json", "info")
    (writer,) = logging.getLogger().handlers
    assert isinstance(writer, LogWriter)
    structlog.get_logger("app").info("long", text="x" * 5000)
    waits, wait_for = [], threading.Condition.wait_for

    def wait(self, predicate, timeout) -> bool:
        waits.append(timeout)
        return wait_for(self, predicate, timeout and 0.01)

    monkeypatch.setattr(threading.Condition, "wait_for", wait)
    logs.flush_each_line()
    structlog.get_logger("app").info("stopped")
    writer.close()
    assert waits == [1.0, 0.0, 0.0]
    while b"stopped" not in os.read(reads, 4096):
        pass


@linux_only
def test_log_lines_that_cannot_be_written_are_dropped_and_counted(monkeypatch, capfd) -> None:
    before = dropped()
    configure_logs("json", "info")
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:  # noqa: PTH123
        patched.setattr(logs, "_STDERR", full.fileno())
        structlog.get_logger("app").info("lost")
        assert text_in_log(capfd) == ""
    structlog.get_logger("app").info("kept")
    assert [line["event"] for line in written(capfd)] == ["log_lines_dropped", "kept"]
    assert dropped() == before + 1


def test_print_beside_log_writes_to_stdout(capfd) -> None:
    configure_logs("console", "info")
    print_beside_log("Try:\n")
    for handler in logging.getLogger().handlers:
        handler.flush()
    assert capfd.readouterr() == ("Try:\n", "")


FORKS = """
import logging, os, structlog
from app.logs import configure_logs
configure_logs("json", "info")
structlog.get_logger().info("parent")
logging.getLogger().handlers[0].flush()
child = os.fork()
structlog.get_logger().info("forked")
logging.shutdown()
if child:
    os.waitpid(child, 0)
"""


@linux_only
def test_a_forked_process_writes_its_log_lines() -> None:
    done = run_script(FORKS, PYTHONWARNINGS="ignore::DeprecationWarning")
    events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert events == ["parent", "forked", "forked"]


def test_a_clients_text_is_escaped_in_the_log() -> None:
    assert escape_text("a\nb\x1b[2J\u202ec") == "a\\nb\\x1b[2J\\u202ec"
    assert escape_text("ß 漢") == "ß 漢"
    assert escape_text("x" * 1000) == "x" * 200
    assert escape_text("a\n" * 3, 3) == "a\\na"


def test_a_sampled_event_is_logged_once_and_the_rest_counted(monkeypatch) -> None:
    now, seconds = 1000.0, 64.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    log = SampledLog(seconds)
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

"""Structured logs, for people on a console or as one JSON object a line."""

import logging
import os
import queue
import sys
import threading
import time
from collections import Counter

import orjson
import prometheus_client
import structlog
from structlog.typing import Processor

from smart_embedder.errors import printable

log = structlog.get_logger(__name__)

_STDOUT, _STDERR = 1, 2
_MAX_CHARACTERS = 200
# Lines that wait for the log's reader: a few megabytes.
_MAX_LINES = 5000
# Seconds that the end of the process waits for a reader to take the last lines.
_FLUSH_SECONDS = 1.0

# The log belongs to the process, so every service in it shows this counter.
lines_dropped = prometheus_client.Counter(
    "embedder_log_lines_dropped_total",
    "Lines that the log lacks, because its reader stalled or its disk was full",
    registry=None,
)


class LogWriter(logging.Handler):
    """Writes lines on a thread, so that a reader of the log that stalls blocks nothing else.

    While the reader stalls, 5,000 lines wait; further lines are dropped and counted. The next line
    that finds room is preceded by a warning with the count. With `flushes_each_line`, which is for
    the end of the process, a line is waited for, at most a second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._refused = self._failed = self._reported = 0
        self.flushes_each_line = self._gave_up = False
        self._start()

    def _start(self) -> None:
        self._lines: queue.Queue[tuple[int, str] | None] = queue.Queue(_MAX_LINES)
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Render the record, and queue its line."""
        # A fork copies no thread: some ASGI servers load the app before they start their workers.
        if not self._thread.is_alive():
            self._start()
        dropped = self._refused + self._failed
        if dropped > self._reported and not self._lines.full():
            count, self._reported = dropped - self._reported, dropped
            structlog.get_logger(__name__).warning("log_lines_dropped", count=count)
        self.write(_STDERR, f"{self.format(record)}\n")
        if self.flushes_each_line:
            self.flush()

    def write(self, descriptor: int, text: str) -> None:
        """Queue text for a file descriptor, or drop it if the queue is full."""
        try:
            self._lines.put_nowait((descriptor, text))
        except queue.Full:
            self._refused += 1
            lines_dropped.inc()

    def flush(self) -> None:
        """Wait until every line is written; once, and for at most a second, where that fails."""
        seconds = 0.0 if self._gave_up else _FLUSH_SECONDS
        with self._lines.all_tasks_done:
            self._gave_up = not self._lines.all_tasks_done.wait_for(
                lambda: not self._lines.unfinished_tasks, seconds
            )

    def close(self) -> None:
        """Write the lines that wait, and end the thread if its reader takes them in time."""
        self.flush()
        if not self._lines.unfinished_tasks:
            self._lines.put(None)
            self._thread.join()
        super().close()

    def _write_lines(self) -> None:
        lines = self._lines
        while (line := lines.get()) is not None:
            descriptor, text = line
            rest = text.encode("utf-8", "backslashreplace")
            try:
                # Not through Python's stream, whose lock the end of the process would wait for.
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                self._failed += 1
                lines_dropped.inc()
            lines.task_done()
        lines.task_done()


def _info_as_debug(record: logging.LogRecord) -> bool:
    """Lower a library's record from info to debug; tell whether it is shown."""
    if record.levelno == logging.INFO:
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return record.levelno >= logging.getLogger().level


def configure_logs(log_format: str, level: str, *, server_at: str = "debug") -> None:
    """Send the service's events and those of every library through one renderer to stderr.

    uvicorn's own lines at info are shown at the level `server_at`, info or debug.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = LogWriter()
    # Renders the service's events, and the records of libraries after the `shared` processors.
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[remove_meta, *renderers(log_format)]
        )
    )
    # Of the caller and the thread, which no line tells.
    logging._srcfile = None  # noqa: SLF001
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # Libraries log only warnings and errors.
    for library in ("httpx", "httpx2", "urllib3", "asyncio", "uvicorn.access"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLogger().level))
    # In place of the handlers that the `uvicorn` command has installed.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    server = logging.getLogger("uvicorn.error")
    server.removeFilter(_info_as_debug)
    if server_at == "debug":
        server.addFilter(_info_as_debug)


def renderers(log_format: str) -> list[Processor]:
    """What makes a line of an event."""
    if log_format == "json":
        dumps = lambda event, **_: orjson.dumps(event, default=str).decode()  # noqa: E731
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(dumps)]
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            sort_keys=False,
            # Where rich is installed, structlog would print every local variable, texts and tokens
            # included.
            exception_formatter=structlog.dev.plain_traceback,
        )
    ]


def print_beside_log(text: str) -> None:
    """Print to stdout without waiting for its reader, in order with the lines of the log."""
    for writer in _writers():
        writer.write(_STDOUT, text)


def flush_each_line() -> None:
    """Write each line before its event goes on, as the process may end without notice."""
    for writer in _writers():
        writer.flushes_each_line = True
        writer.flush()


def _writers() -> list[LogWriter]:
    handlers = logging.getLogger().handlers
    return [handler for handler in handlers if isinstance(handler, LogWriter)]


class SampledLog:
    """Writes each event at most once in `seconds`, with how many were left out since then.

    For warnings that clients can cause as often as they like.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._quiet_until: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, event: str, **facts: object) -> None:
        """Write the event, or count it if the same one was written less than `seconds` ago."""
        now = time.monotonic()
        if now < self._quiet_until.get(event, now):
            self._left_out[event] += 1
            return
        self._quiet_until[event] = now + self._seconds
        log.warning(event, **facts, left_out=self._left_out.pop(event, 0))


def escape_text(text: str, max_characters: int = _MAX_CHARACTERS) -> str:
    """The start of a client's text, safe for a line of a log or an error message."""
    return printable(text[:max_characters])

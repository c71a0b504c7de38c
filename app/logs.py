"""Structured logs, for people on a console or with one JSON object a line."""

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
# At most this many lines, a few megabytes, wait for the reader of the log.
_MAX_LINES = 5000
# Seconds for which the process waits at its end for the last lines to be written.
_FLUSH_SECONDS = 1.0

# Registered with the metrics of every service in the process, which share the log.
lines_dropped = prometheus_client.Counter(
    "embedder_log_lines_dropped_total",
    "Lines missing in the log, because its reader stalled or its disk was full",
    registry=None,
)


class LogWriter(logging.Handler):
    """Writes lines on a thread, so that a stalled reader of the log does not block the service.

    While the reader stalls, 5,000 lines wait; further lines are dropped. Before the next line that
    is queued, a warning with the number of dropped lines is logged. With `flushes_each_line`, for
    the end of the process, `emit` waits until the line is written, at most a second.
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
        # A fork has no copy of the thread; some ASGI servers load the app before they fork workers.
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
        """Wait until every line is written, at most a second; do not wait after a timeout."""
        seconds = 0.0 if self._gave_up else _FLUSH_SECONDS
        with self._lines.all_tasks_done:
            self._gave_up = not self._lines.all_tasks_done.wait_for(
                lambda: not self._lines.unfinished_tasks, seconds
            )

    def close(self) -> None:
        """Write the waiting lines, and end the thread if all could be written in time."""
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
                # Not through Python's stream, on whose lock the end of the process would wait.
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                self._failed += 1
                lines_dropped.inc()
            lines.task_done()
        lines.task_done()


def _info_as_debug(record: logging.LogRecord) -> bool:
    """Lower a record from info to debug, and return whether it is shown."""
    if record.levelno == logging.INFO:
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return record.levelno >= logging.getLogger().level


def configure_logs(log_format: str, level: str, *, server_at: str = "debug") -> None:
    """Write the service's events and the records of all libraries to stderr, in one format.

    uvicorn's records at info are logged at the level `server_at`, info or debug.
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
    # Renders the service's events as they are, and records of libraries after `shared`.
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[remove_meta, *renderers(log_format)]
        )
    )
    # Do not look up the caller, thread and process: no line shows them.
    logging._srcfile = None  # noqa: SLF001
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # Libraries log only warnings and errors.
    for library in ("httpx", "httpx2", "urllib3", "asyncio", "uvicorn.access"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLogger().level))
    # Replace the handlers that the `uvicorn` command has installed.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    server = logging.getLogger("uvicorn.error")
    server.removeFilter(_info_as_debug)
    if server_at == "debug":
        server.addFilter(_info_as_debug)


def renderers(log_format: str) -> list[Processor]:
    """The processors that render an event as a line."""
    if log_format == "json":
        dumps = lambda event, **_: orjson.dumps(event, default=str).decode()  # noqa: E731
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(dumps)]
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            sort_keys=False,
            # If rich is installed, structlog's default would print every local variable, including
            # texts and tokens.
            exception_formatter=structlog.dev.plain_traceback,
        )
    ]


def print_beside_log(text: str) -> None:
    """Print to stdout on the log's thread, in order with the lines of the log."""
    for writer in _writers():
        writer.write(_STDOUT, text)


def flush_each_line() -> None:
    """Write each line before `emit` returns, as the process may end without notice."""
    for writer in _writers():
        writer.flushes_each_line = True
        writer.flush()


def _writers() -> list[LogWriter]:
    handlers = logging.getLogger().handlers
    return [handler for handler in handlers if isinstance(handler, LogWriter)]


class SampledLog:
    """Logs each event at most once in `seconds`, with the number that was left out since then.

    For warnings that clients can cause as often as they like.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._quiet_until: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, event: str, **facts: object) -> None:
        """Log the event, or only count it if it was logged less than `seconds` ago."""
        now = time.monotonic()
        if now < self._quiet_until.get(event, now):
            self._left_out[event] += 1
            return
        self._quiet_until[event] = now + self._seconds
        log.warning(event, **facts, left_out=self._left_out.pop(event, 0))


def escape_text(text: str, max_characters: int = _MAX_CHARACTERS) -> str:
    """Return the start of a client's text, made safe for a log line or an error message."""
    return printable(text[:max_characters])

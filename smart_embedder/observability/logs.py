"""Structured logs, for people on a console or as one JSON object a line."""

import logging
import sys
import time
from collections import Counter

import orjson
import structlog
from structlog.typing import Processor

from smart_embedder.errors import printable

log = structlog.get_logger(__name__)

_MAX_CHARACTERS = 200


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
    handler = logging.StreamHandler(sys.stderr)
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
            # Where rich is installed, structlog would print every local variable, texts and tokens
            # included.
            exception_formatter=structlog.dev.plain_traceback,
        )
    ]


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

"""Structured logs, for people on a console or as one JSON object a line."""

import logging
import sys

import orjson
import structlog
from structlog.typing import Processor


class _AtDebug(logging.Filter):
    """Shows at debug what a library says at info."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether the record is shown."""
        if record.levelno == logging.INFO:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return record.levelno >= logging.getLogger().level


_AT_DEBUG = _AtDebug()


def configure_logs(log_format: str, level: str, *, server_at: str = "debug") -> None:
    """Send our own events and those of every library through one renderer to standard error.

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
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(log_format),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # Libraries report their own doings only when something is wrong.
    for library in ("httpx", "httpx2", "urllib3", "asyncio", "uvicorn.access"):
        logging.getLogger(library).setLevel(logging.WARNING)
    _take_over_uvicorn(server_at)


def _take_over_uvicorn(server_at: str) -> None:
    """Where uvicorn is the command, it has made handlers of its own."""
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    server = logging.getLogger("uvicorn.error")
    server.removeFilter(_AT_DEBUG)
    if server_at == "debug":
        server.addFilter(_AT_DEBUG)


def _renderers(log_format: str) -> list[Processor]:
    if log_format == "json":
        dumps = lambda event, **_: orjson.dumps(event, default=str).decode()  # noqa: E731
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(dumps)]
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            # Where rich is installed, structlog would print every local variable: a thousand lines,
            # and the texts and tokens among them.
            exception_formatter=structlog.dev.plain_traceback,
        )
    ]

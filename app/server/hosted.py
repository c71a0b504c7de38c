"""What is different where another program serves the app, as `uvicorn app.main:app` does."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from app.errors import StartupError
from app.observability.logs import configure_logs
from app.server.announcement import report_failure, warn_of_misspelt_names
from app.settings import Settings
from app.settings.sources import load_settings


@contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """End the host where the app cannot be made; it would print a traceback."""
    try:
        yield
    except StartupError as error:
        sys.exit(f"Smart Embedder cannot start: {error}")


def settle_in() -> Settings:
    """Read the settings and take over the log; the host's own flags say where it listens."""
    settings = load_settings()
    configure_logs(settings.log_format, settings.log_level, server_at="info")
    warn_of_misspelt_names()
    return settings


def end_uvicorn(error: Exception) -> None:
    """End uvicorn with status 1, the reason last; any other host keeps an unhealthy service."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if not isinstance(server, uvicorn.Server):
        report_failure(error)
        return
    server.should_exit = True
    atexit.register(_end, error)


def _end(error: Exception) -> None:
    report_failure(error)
    os._exit(1)

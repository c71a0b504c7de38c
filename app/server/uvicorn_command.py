"""The start of the app by the command `uvicorn app.main:app`, or by another ASGI server."""

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from app.errors import StartupError
from app.observability.logs import configure_logs
from app.server.startup_log import log_failure, warn_of_misspelt_names
from app.settings import Settings
from app.settings.sources import load_settings


@contextmanager
def exit_on_startup_error() -> Iterator[None]:
    """Exit with one sentence if the app cannot be created; uvicorn would print a traceback."""
    try:
        yield
    except StartupError as error:
        sys.exit(f"Smart Embedder cannot start: {error}")


def load_settings_and_configure_logs() -> Settings:
    """Read the settings and take over the log; uvicorn's own flags say where it listens."""
    settings = load_settings()
    configure_logs(settings.log_format, settings.log_level, server_at="info")
    warn_of_misspelt_names()
    return settings


def stop_uvicorn(error: Exception) -> None:
    """End uvicorn with status 1, the reason last; another ASGI server keeps an unhealthy app."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if not isinstance(server, uvicorn.Server):
        log_failure(error)
        return
    server.should_exit = True
    atexit.register(_exit, error)


def _exit(error: Exception) -> None:
    log_failure(error)
    os._exit(1)

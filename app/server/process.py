"""The service as a process: from settings to an exit status."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TextIO

import uvicorn
from starlette.types import ASGIApp

from app.engine.loaded_models import LoadedModels
from app.errors import StartupError
from app.observability.logs import configure_logs
from app.server.connection import bounded_connection
from app.server.drain import Drain
from app.server.garbage import collect_rarely, freeze_startup_objects
from app.server.ports import require_port
from app.server.server import DrainingServer
from app.server.startup_log import log_failure, log_ready, warn_of_misspelt_names
from app.settings import Settings
from app.settings.sources import load_settings

# Seconds. Longer than clients and proxies keep an idle connection (httpx 5, nginx 60): a request
# that is sent while the server closes its connection gets no response.
IDLE_TIMEOUT = 75


class CreateApp(Protocol):
    """Creates the app that is served, which tracks its requests with `drain`."""

    def __call__(
        self,
        settings: Settings,
        *,
        drain: Drain,
        on_ready: Callable[[LoadedModels], None],
        on_settled: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> ASGIApp:
        """Create the app; its lifespan calls `on_ready` or `on_failure` when the start is over.

        It calls `on_settled` when nothing is left to do that only the start does.
        """


def run(create_app: CreateApp, arguments: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT; the exit status tells whether the start succeeded."""
    # Until the server sets its own handlers: without one, process 1 of a container ignores SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    collect_rarely()
    try:
        settings = load_settings(arguments)
        configure_logs(settings.log_format, settings.log_level)
        warn_of_misspelt_names()
        require_port(settings.host, settings.port)
        status = serve(settings, create_app)
    except StartupError as error:
        status = 1
        with suppress(OSError):
            print(f"Smart Embedder cannot start: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        status = 0
    _exit(status)


def serve(settings: Settings, create_app: CreateApp) -> int:
    """Run the service; 0 after a graceful shutdown, 1 where the models could not be loaded."""
    failures: list[Exception] = []

    def on_ready(models: LoadedModels) -> None:
        log_ready(models, server.url)
        if settings.log_format == "console":
            _print_example(server.url, settings)

    def on_failure(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    drain = Drain()
    app = create_app(
        settings,
        drain=drain,
        on_ready=on_ready,
        on_settled=freeze_startup_objects,
        on_failure=on_failure,
    )
    server = DrainingServer(
        _uvicorn_config(app, settings, drain),
        drain,
        settings.shutdown_timeout,
        settings.shutdown_delay,
    )
    try:
        server.run()
    except SystemExit:
        # Raises a `StartupError` if another process has taken the port since it was checked.
        require_port(settings.host, settings.port)
        raise
    # After the server has stopped, so that the log ends with the reason.
    for error in failures:
        log_failure(error)
    return 1 if failures or not server.started else 0


def _uvicorn_config(app: ASGIApp, settings: Settings, drain: Drain) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_connection(settings.request_timeout, drain),
        ws="none",
        timeout_keep_alive=IDLE_TIMEOUT,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )


def _exit(status: int) -> None:
    """End the process, without waiting for threads that may never end."""
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    if threading.active_count() == 1:
        sys.exit(status)
    # Such as a device thread that hangs, or one that still loads a model.
    logging.shutdown()
    os._exit(status)


def _flush(stream: TextIO | None) -> None:
    """Flush, or drop the output where that fails: Python would exit with status 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_example(url: str, settings: Settings) -> None:
    page = f"\nSee it: {url}/ui" if settings.ui else ""
    header = ""
    if settings.api_token or settings.api_tokens_file:
        # The variable and not the token: what is printed stays in logs.
        header = '-H "Authorization: Bearer $API_TOKEN" '
        page = f"\nRequests need a token: API_TOKEN in the example.{page}"
    with suppress(OSError):  # The reader may be gone, or the disk full.
        print(page + _EXAMPLE.format(url=url, header=header), flush=True)


_EXAMPLE = """
Documentation: {url}/docs. Try:

  curl -s {url}/embeddings/ -H 'Content-Type: application/json' \\
    {header}-d '{{"sentences": ["What is hybrid search?"], "return_colbert": false}}'
"""

"""The service as a process: from settings to an exit status."""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TextIO

import structlog
import uvicorn
from starlette.types import ASGIApp

from app.engine.loaded_models import LoadedModels
from app.errors import StartupError
from app.observability.logs import configure_logs
from app.server.announcement import announce, report_failure, warn_of_misspelt_names
from app.server.connection import bounded_connection
from app.server.drain import Drain
from app.server.draining_server import DrainingServer
from app.server.garbage import collect_rarely, spare_what_stays
from app.server.ports import require_port
from app.settings import Settings
from app.settings.sources import load_settings

log = structlog.get_logger(__name__)


class CreateApp(Protocol):
    """Makes the app that is served, which counts its requests with `drain`."""

    def __call__(
        self,
        settings: Settings,
        *,
        drain: Drain,
        on_ready: Callable[[LoadedModels], None],
        on_failure: Callable[[Exception], None],
    ) -> ASGIApp:
        """The app; its lifespan calls `on_ready` or `on_failure` when the models are loaded."""


def run(create_app: CreateApp, arguments: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT; the exit status tells whether the start succeeded."""
    # Until the server has its own handlers: as PID 1 a process without any cannot be stopped.
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
    """Run the service; 0 after an orderly end, 1 where the models could not be loaded."""
    failures: list[Exception] = []

    def on_ready(models: LoadedModels) -> None:
        spare_what_stays()
        announce(models, server.url)
        if settings.log_format == "console":
            _show_an_example(server.url)

    def on_failure(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    drain = Drain()
    app = create_app(settings, drain=drain, on_ready=on_ready, on_failure=on_failure)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_connection(settings.request_timeout, drain),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    server = _Server(config, drain, settings.shutdown_timeout)
    server.run()
    # Last, so that the reason is what the log ends with.
    for error in failures:
        report_failure(error)
    return 1 if failures or not server.started else 0


class _Server(DrainingServer):
    """Says where it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the address."""
        await super().startup(sockets)
        if self.started:
            log.info("listening", url=self.url)

    @property
    def url(self) -> str:
        """The address to call it at."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        host = _LOOPBACK.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# What listens on every address is called at one.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}  # noqa: S104


def _exit(status: int) -> None:
    """End the process, whether or not every thread can be waited for."""
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    if threading.active_count() == 1:
        sys.exit(status)
    # A device that never comes back, or a model that is still being loaded, must not hold it.
    logging.shutdown()
    os._exit(status)


def _flush(stream: TextIO | None) -> None:
    """Write what is left; where that fails it is dropped, or Python would end with status 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show_an_example(url: str) -> None:
    with suppress(OSError):  # Nobody may be there to read it, or no room on the disk.
        print(_EXAMPLE.format(url=url), flush=True)


_EXAMPLE = """
Documentation: {url}/docs. Try:

  curl -s {url}/embeddings/ -H 'Content-Type: application/json' \\
    -d '{{"sentences": ["What is hybrid search?"], "return_colbert": false}}'
"""

"""The service as a process: from settings to an exit status."""

import atexit
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

import structlog
import uvicorn
from starlette.types import ASGIApp

from app.connection import bounded_connection
from app.logs import configure_logs, print_beside_log
from app.ports import is_loopback, require_port
from app.server import Drain, DrainingServer
from app.settings import (
    REMOVED,
    Settings,
    load_settings,
    removed_setting,
    unknown_names,
)
from smart_embedder.errors import StartupError
from smart_embedder.interface import LoadedModels, Model, human_size
from smart_embedder.requests import ANSWER_BYTES

# Seconds. Longer than clients and proxies keep an idle connection (httpx 5, nginx 60): a request
# that is sent while the server closes its connection gets no response.
IDLE_TIMEOUT = 75
# Allocations before a collection of the youngest generation, and collections before the older ones.
_STARTUP_THRESHOLD = (20_000, 1000, 1000)
_DEFAULT_THRESHOLD = gc.get_threshold()
_EXAMPLE = """
Documentation: {url}/docs. Try:

  curl -s {url}/embeddings/ -H 'Content-Type: application/json' \\
    {header}-d '{{"sentences": ["What is hybrid search?"], "return_colbert": false}}'
"""
# Creates the app of some settings, as `app.main.create_app`.
CreateApp = Callable[..., ASGIApp]
log = structlog.get_logger(__name__)


def run(create_app: CreateApp, arguments: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT; the exit status tells whether the start succeeded."""
    # Until the server sets its own handlers: without one, process 1 of a container ignores SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    collect_rarely()
    try:
        settings = load_settings_and_configure_logs(arguments, server_at="debug")
        require_port(settings.host, settings.port)
        if not (settings.api_token or settings.api_tokens_file or is_loopback(settings.host)):
            log.warning(
                "no_token",
                host=settings.host,
                note="everyone who can reach this address can use the service: set API_TOKEN or "
                "API_TOKENS_FILE, or let only this machine reach it",
            )
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
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=bounded_connection(settings.request_timeout),
        ws="none",
        timeout_keep_alive=IDLE_TIMEOUT,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    server = DrainingServer(config, drain, settings.shutdown_timeout, settings.shutdown_delay)
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


def _print_example(url: str, settings: Settings) -> None:
    page = f"\nSee it: {url}/ui" if settings.ui else ""
    header = ""
    if settings.api_token or settings.api_tokens_file:
        # The variable and not the token: what is printed stays in logs.
        header = '-H "Authorization: Bearer $API_TOKEN" '
        page = f"\nRequests need a token: API_TOKEN in the example.{page}"
    print_beside_log(page + _EXAMPLE.format(url=url, header=header) + "\n")


def _exit(status: int) -> None:
    """End the process, without waiting for threads that may never end."""
    logging.shutdown()
    if threading.active_count() == 1:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            _flush(stream)
        sys.exit(status)
    # Such as a device thread that hangs, one that still loads a model, or the log's, whose reader
    # stalls.
    os._exit(status)


def _flush(stream: TextIO) -> None:
    """Flush, or drop the output where that fails: Python would exit with status 120."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def load_settings_and_configure_logs(
    arguments: Sequence[str] = (), server_at: str = "info"
) -> Settings:
    """Read the settings, take over the log, and warn of unknown and old names of settings."""
    settings = load_settings(arguments)
    configure_logs(settings.log_format, settings.log_level, server_at=server_at)
    for name in sorted(set(map(str.upper, os.environ)) & REMOVED.keys()):
        log.warning("removed_setting", reason=removed_setting(name))
    for name, setting in unknown_names():
        log.warning("unknown_setting", name=name, nearest=setting)
    return settings


def stop_uvicorn(error: Exception) -> None:
    """End uvicorn with status 1, the reason last; another ASGI server keeps an unhealthy app."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if not isinstance(server, uvicorn.Server):
        log_failure(error)
        return
    server.should_exit = True
    atexit.register(_exit_uvicorn, error)


def _exit_uvicorn(error: Exception) -> None:
    log_failure(error)
    os._exit(1)


def log_ready(models: LoadedModels, url: str | None = None) -> None:
    """Log that the service is ready, with the limits in force, and its `url` if that is known."""
    reranker = models.embedder if models.late_interaction else models.reranker
    if reranker is not None:
        log.info("Reranker ready.", **_limits(reranker))
    if models.demo:
        log.warning("demo_model", note=models.demo)
    log.info(
        "Server ready to accept requests",
        **({} if url is None else {"url": url}),
        **_limits(models.embedder),
        device=models.device.description,
        dtype=models.device.dtype,
        attention=models.device.attention,
        max_batch_tokens=models.max_batch_tokens,
    )


def log_memory(settings: Settings, body: int, answer: int, left: int) -> None:
    """Warn where the largest `body` or `answer` that fits is smaller than the limits allow.

    Both are parts of the bytes of memory that are `left`, so the bytes that are missing follow.
    """
    wanted = max(settings.max_body_bytes / max(1, body), ANSWER_BYTES / max(1, answer))
    if wanted > 1:
        log.warning(
            "memory_short",
            left=human_size(left),
            missing=human_size(int(left * (wanted - 1))),
            largest_body_bytes=min(body, settings.max_body_bytes),
            largest_answer_bytes=min(answer, ANSWER_BYTES),
        )


def _limits(model: Model) -> dict[str, str | int]:
    """The model's name and its limits in force, which may be lower than the settings."""
    limits: dict[str, str | int] = {"model": model.name, "max_length": model.max_length}
    if model.max_batch_sequences is not None:
        limits["max_pairs_in_forward"] = model.max_batch_sequences
    return limits


def log_failure(error: Exception) -> None:
    """Log why the start failed; the last line holds the reason."""
    reason = str(error)
    if not isinstance(error, StartupError):
        first_line = reason.partition("\n")[0]
        reason = f"unexpected error while loading: {type(error).__name__}: {first_line}"
        log.error("unexpected_error", exc_info=error)
    log.error("start_failed", reason=reason)


def collect_rarely() -> None:
    """Collect rarely while libraries and models load: their objects stay, and scans cost 0.4 s."""
    gc.set_threshold(*_STARTUP_THRESHOLD)


def freeze_startup_objects() -> None:
    """Exclude every present object from collections, and collect as usual from now on.

    These are more than 400,000 objects; a full collection that scanned them stopped every thread
    for 0.3 seconds, /health included.
    """
    gc.freeze()
    gc.set_threshold(*_DEFAULT_THRESHOLD)

"""Runs the service: reads the settings, starts the log and the server, and logs how it began.

uvicorn alone, as `uvicorn app.main:app`, takes the settings and the lines of the log from here.
"""

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
from app.middleware.draining import Drain
from app.ports import is_loopback, listen_on_both_families, require_port
from app.server import DrainingServer
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
# `app.main.create_app`, or a test's.
CreateApp = Callable[..., ASGIApp]

log = structlog.get_logger(__name__)


def run(create_app: CreateApp, arguments: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT; the exit status is 1 if the start failed."""
    # Until the server sets its handlers. Without one, process 1 of a container ignores SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    delay_garbage_collection()
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
    """Run the service; return 0 after a graceful shutdown, 1 if the models could not be loaded."""
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
        server.run(listen_on_both_families(settings.host, settings.port))
    except (SystemExit, OSError):
        # Raises `StartupError` if another process has taken the port since the first check.
        require_port(settings.host, settings.port)
        raise
    # After the server has stopped, so that the last line of the log holds the reason.
    for error in failures:
        log_failure(error)
    return 1 if failures or not server.started else 0


def _print_example(url: str, settings: Settings) -> None:
    page = f"\nSee it: {url}/ui" if settings.ui else ""
    header = ""
    if settings.api_token or settings.api_tokens_file:
        # The variable instead of the token, because the output may be kept in logs.
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
    # A device thread that hangs, a thread that still loads a model, or the log's, if its reader
    # stalls.
    os._exit(status)


def _flush(stream: TextIO) -> None:
    """Flush, or drop the output if that fails; otherwise Python would exit with status 120."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def load_settings_and_configure_logs(
    arguments: Sequence[str] = (), server_at: str = "info"
) -> Settings:
    """Read the settings, configure the log, and warn of unknown and removed settings."""
    settings = load_settings(arguments)
    configure_logs(settings.log_format, settings.log_level, server_at=server_at)
    for name in sorted(set(map(str.upper, os.environ)) & REMOVED.keys()):
        log.warning("removed_setting", reason=removed_setting(name))
    for name, setting in unknown_names():
        log.warning("unknown_setting", name=name, nearest=setting)
    return settings


def stop_uvicorn(error: Exception) -> None:
    """Stop uvicorn with status 1 after logging the reason; other servers keep an unhealthy app."""
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
    """Log that the service is ready, with the effective limits and, if known, its `url`."""
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
    """Warn if the largest `body` or `answer` that fits, in bytes, is smaller than its limit.

    Both are fixed shares of the `left` bytes of memory. That many times more memory would make the
    limits fit.
    """
    factor = max(settings.max_body_bytes / max(1, body), ANSWER_BYTES / max(1, answer))
    if factor > 1:
        log.warning(
            "memory_short",
            left=human_size(left),
            missing=human_size(int(left * (factor - 1))),
            largest_body_bytes=min(body, settings.max_body_bytes),
            largest_answer_bytes=min(answer, ANSWER_BYTES),
        )


def _limits(model: Model) -> dict[str, str | int]:
    """The model's name and its effective limits, which may be lower than the settings."""
    limits: dict[str, str | int] = {"model": model.name, "max_length": model.max_length}
    if model.max_batch_sequences is not None:
        limits["max_pairs_in_forward"] = model.max_batch_sequences
    return limits


def log_failure(error: Exception) -> None:
    """Log why the start failed, with the reason in the last line."""
    reason = str(error)
    if not isinstance(error, StartupError):
        first_line = reason.partition("\n")[0]
        reason = f"unexpected error while loading: {type(error).__name__}: {first_line}"
        log.error("unexpected_error", exc_info=error)
    log.error("start_failed", reason=reason)


def delay_garbage_collection() -> None:
    """Collect garbage rarely during the start: its objects stay, and collections cost 0.4 s."""
    gc.set_threshold(*_STARTUP_THRESHOLD)


def freeze_startup_objects() -> None:
    """Exclude all present objects from garbage collection, and collect as usual from now on.

    There are more than 400,000; a full collection of them would stop all threads for 0.3 seconds.
    """
    gc.freeze()
    gc.set_threshold(*_DEFAULT_THRESHOLD)

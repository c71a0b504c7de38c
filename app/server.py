"""uvicorn's server with a graceful shutdown that loses no request.

uvicorn closes its port at once. The system then refuses new connections, and resets those in the
backlog, which the server has not accepted yet. This server keeps its port open and answers 503
until every accepted request has its response. Then it keeps new connections out and serves those in
the backlog.
"""

import asyncio
import atexit
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO

import structlog
import uvicorn
from starlette.types import ASGIApp

from app.connection import BoundedConnection, bounded_connection
from app.logs import configure_logs, print_beside_log
from app.middleware.draining import Drain
from app.ports import is_loopback, require_port
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

_SHARE_FOR_RESPONSES = 0.9
_SIGNAL_STATUS = 128
# uvicorn calls `on_tick` ten times a second.
_TICKS_PER_SECOND = 10
# How long connections may stay open once every request has its response, and how often to check.
_LINGER_SECONDS = 1.0
_POLL_SECONDS = 0.02
# After this time, handshakes that began before new connections were kept out are complete.
_HANDSHAKE_SECONDS = 0.1
# A wildcard address cannot be called, so the log shows the loopback address instead.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104

# A classic BPF program for the kernel's socket filter: (operation, jump if true, if false, k).
_LOAD_BYTE, _JUMP_IF_SET, _RETURN = 0x30, 0x45, 0x06
_TCP_FLAGS, _SYN, _WHOLE_PACKET = 13, 0x02, 0xFFFF_FFFF
_DROP_SYN = (
    (_LOAD_BYTE, 0, 0, _TCP_FLAGS),
    (_JUMP_IF_SET, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, _WHOLE_PACKET),
)
_SO_ATTACH_FILTER = 26


class DrainingServer(uvicorn.Server):
    """A server that drains after a signal: `delay` seconds after SIGTERM, at once after SIGINT.

    After nine tenths of `timeout` seconds the drain times out, so that there is time left to send
    an error to every request in work. The port is closed when every client has read its response,
    or after a second. A second signal ends the process at once. The log has the begin of the drain,
    the number of requests in work, the number of aborted requests, and the end.
    """

    def __init__(
        self, config: uvicorn.Config, drain: Drain, timeout: float, delay: float = 0.0
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._timeout = timeout
        self._delay = delay
        self._aborted = 0

    @property
    def url(self) -> str:
        """The URL at which the server can be called."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        host = _LOOPBACK.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the URL."""
        await super().startup(sockets)
        if self.started:
            log.info("listening", url=self.url)

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Begin to drain; at a second signal, exit with the status of that signal."""
        name = signal.Signals(sig).name
        if self._drain.announced:
            # Not through the log, which the signal may have interrupted while it was writing, and
            # not to a full pipe, which would block.
            if has_event(2, "POLLOUT"):
                in_work = f"with {self._drain.count} requests in work"
                os.write(2, f"second signal ({name}): ended at once, {in_work}\n".encode())
            os._exit(_SIGNAL_STATUS + sig)
        self._drain.announced = True
        loop = asyncio.get_running_loop()
        delay = self._delay if sig == signal.SIGTERM else 0.0
        if not delay:
            self._drain.begin()  # Before any other callback of the loop.
        loop.call_soon_threadsafe(self._announce, name, delay)

    def _announce(self, signal_name: str, delay: float) -> None:
        if not delay:
            self._begin_to_drain(signal_name)
            return
        log.info("shutdown_announced", signal=signal_name, drains_in_seconds=delay)
        asyncio.get_running_loop().call_later(delay, self._begin_to_drain, signal_name)

    def _begin_to_drain(self, signal_name: str) -> None:
        self._drain.begin()
        log.info(
            "draining",
            signal=signal_name,
            requests_in_work=self._drain.count,
            most_seconds=self._timeout,
        )
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Once a second, let each connection count how long it has waited for its client."""
        if counter % _TICKS_PER_SECOND == 0:
            for connection in [*self.server_state.connections]:
                if isinstance(connection, BoundedConnection):
                    connection.tick()
        return await super().on_tick(counter)

    async def main_loop(self) -> None:
        """Serve until a signal arrives and every accepted request has its response."""
        await super().main_loop()
        self._drain.begin()
        try:
            async with asyncio.timeout(
                self._drain.seconds_left(self._timeout * _SHARE_FOR_RESPONSES)
            ):
                await self._drain.wait_for_none()
        except TimeoutError:
            self._aborted = self._drain.count
            self._drain.time_out()
        await self._finish_connections()
        # uvicorn declares whole seconds, but only passes them to asyncio, which takes fractions.
        self.config.timeout_graceful_shutdown = self._drain.seconds_left(self._timeout)  # type: ignore[assignment]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the remaining connections, and log the end."""
        await super().shutdown(sockets)
        seconds = self._timeout - self._drain.seconds_left(self._timeout)
        log.info("stopped", requests_aborted=self._aborted, drained_seconds=round(seconds, 3))

    async def _finish_connections(self) -> None:
        """Keep new connections out, and wait until each client has read its response."""
        listeners = [listener.fileno() for server in self.servers for listener in server.sockets]
        for listener in listeners:
            _refuse_new_connections(listener)
        left = self._drain.seconds_left(self._timeout)
        await asyncio.sleep(min(_HANDSHAKE_SECONDS, left))
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_LINGER_SECONDS, left)):
                # uvicorn has no event for the end of a connection.
                while self.server_state.connections or any(map(_has_backlog, listeners)):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)


def has_event(connection: Any, event: str) -> bool:
    """Whether a socket, or its descriptor, has this event of `select.poll` now. Reads nothing.

    False on systems without `select.poll`.
    """
    if not hasattr(select, event):
        return False
    poll = select.poll()
    poll.register(connection, getattr(select, event))
    return bool(poll.poll(0))


def _refuse_new_connections(listener: int) -> None:
    """Refuse new connections at a listening descriptor; those in the backlog stay.

    On Linux, a filter drops the first packet (SYN) of new connections: the client's system sends it
    again after a second and then finds the port closed. Elsewhere the backlog is limited to the
    connections that it holds.
    """
    with socket.socket(fileno=os.dup(listener)) as duplicate:
        if sys.platform != "linux" or not _drop_syn(duplicate):
            duplicate.listen(0)


def _has_backlog(listener: int) -> bool:
    """Whether connections wait to be accepted."""
    return has_event(listener, "POLLIN")


def _drop_syn(listener: socket.socket) -> bool:
    """Attach the filter; return False if the kernel refuses it, as some sandboxes do."""
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _DROP_SYN)
    memory = ctypes.create_string_buffer(program, len(program))
    option = struct.pack("@HP", len(_DROP_SYN), ctypes.addressof(memory))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
    except OSError:
        return False
    return True


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
        server.run()
    except SystemExit:
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

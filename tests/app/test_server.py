"""The graceful shutdown, with real sockets on loopback and a clock that skips waiting."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from structlog.testing import capture_logs

from app import server
from app.connection import bounded_connection
from app.middleware import draining
from app.middleware.draining import Drain
from app.server import DrainingServer
from tests.support.skipped_time import in_skipped_time, now, run_ready

TIMEOUT = 30.0
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    """Measure the time of a drain by the clock of the loop."""
    monkeypatch.setattr(draining.time, "monotonic", now)


@in_skipped_time
async def test_the_time_of_a_drain_begins_once() -> None:
    drain = Drain()
    await asyncio.sleep(100)
    assert (drain.begun, drain.announced, drain.seconds_left(30)) == (False, False, 30)
    drain.begin()
    assert (drain.begun, drain.announced) == (True, True)
    await asyncio.sleep(10)
    drain.begin()
    assert drain.seconds_left(30) == pytest.approx(20, abs=0.01)
    await asyncio.sleep(100)
    assert drain.seconds_left(30) == 0


class Service:
    """A server, and an app that answers after `seconds`, or never."""

    def __init__(self, *, host: str = "127.0.0.1", delay: float = 0.0) -> None:
        self.drain = Drain()
        self.seconds = 0.0
        self.failed: list[float] = []
        self.entered = asyncio.Event()
        self._never = asyncio.Event()
        self.drain.time_out = self._time_out
        config = uvicorn.Config(
            self._app,
            host=host,
            port=0,
            http=bounded_connection(90),
            interface="asgi3",
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=1000,
        )
        self.server = DrainingServer(config, self.drain, TIMEOUT, delay)

    def _time_out(self) -> None:
        self.failed.append(now())
        self._never.set()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered.set()
        with self.drain.track():
            await receive()
            if self.seconds > 1000:
                await self._never.wait()
            else:
                await asyncio.sleep(self.seconds)
            headers = [(b"content-length", b"2")]
            if self.drain.begun:  # As `RefuseWhileDraining` does.
                headers.append((b"connection", b"close"))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"ok"})

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.server.url.removeprefix("http://").rsplit(":", 1)
        return host.strip("[]"), int(port)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        serving = asyncio.create_task(self.server.serve())
        while not self.server.started:  # noqa: ASYNC110 - turns, not time
            await asyncio.sleep(0)
        try:
            yield serving
        finally:
            self.server.should_exit = True
            self._never.set()
            await serving

    async def call(self, request: bytes = GET) -> bytes:
        """The response to one request, after the server has closed its connection."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer


async def in_work(service: Service) -> "asyncio.Task[bytes]":
    """A request that the app has begun."""
    call = asyncio.create_task(service.call())
    await service.entered.wait()
    return call


@pytest.mark.parametrize(
    ("seconds", "ends", "failed"),
    [
        pytest.param(20, 20, [], id="is answered"),
        pytest.param(10_000, 27, [27], id="is failed while there is time to say so"),
    ],
)
@in_skipped_time
async def test_the_server_stops_after_the_requests_in_work(
    seconds: float, ends: float, failed: list[float]
) -> None:
    service = Service()
    service.seconds = seconds
    with capture_logs() as log:
        async with service.running() as serving:
            call = await in_work(service)
            assert not call.done()
            began = now()
            service.server.handle_exit(signal.SIGTERM, None)
            assert service.drain.begun
            answer = await call
            assert b"ok" in answer
            assert b"connection: close" in answer
            await serving
    _, draining, stopped = log
    assert (draining["event"], draining["signal"]) == ("draining", "SIGTERM")
    assert (draining["requests_in_work"], draining["most_seconds"]) == (1, TIMEOUT)
    assert (stopped["event"], stopped["requests_aborted"]) == ("stopped", len(failed))
    assert stopped["drained_seconds"] == pytest.approx(now() - began, abs=0.2)
    failures = [moment - began for moment in service.failed]
    assert failures == [pytest.approx(moment, abs=0.2) for moment in failed]
    assert ends <= now() - began <= min(ends + 3, TIMEOUT)


@in_skipped_time
async def test_shutdown_delay_applies_to_sigterm_and_not_to_sigint() -> None:
    service = Service(delay=10)
    async with service.running() as serving:
        began = now()
        with capture_logs() as log:
            service.server.handle_exit(signal.SIGTERM, None)
            await asyncio.sleep(9)
        (line,) = log
        assert (line["event"], line["drains_in_seconds"]) == ("shutdown_announced", 10)
        assert (service.drain.announced, service.drain.begun) == (True, False)
        service.seconds = 5
        answer = await service.call()
        assert b"connection: close" in answer
        await serving
        assert 14 <= now() - began <= 17
    service = Service(delay=10)
    async with service.running() as serving:
        service.server.handle_exit(signal.SIGINT, None)
        assert service.drain.begun
        began = now()
        await serving
        assert now() - began < 3


@in_skipped_time
async def test_an_idle_connection_delays_the_shutdown_by_a_second_at_most() -> None:
    service = Service()
    async with service.running() as serving:
        reader, writer = await asyncio.open_connection(*service.address)
        writer.write(GET)
        await reader.readuntil(b"ok")
        began = now()
        service.server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0.5)
        with socket.socket() as late:
            late.settimeout(0.05)
            with pytest.raises(OSError, match="timed out"):
                late.connect(service.address)
        await serving
        assert 1 <= now() - began <= 3
        assert await reader.read() == b""
        writer.close()


@in_skipped_time
async def test_the_port_answers_until_every_request_has_its_response() -> None:
    service = Service()
    service.seconds = 10
    async with service.running() as serving:
        call = await in_work(service)
        service.server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(5)
        late = asyncio.create_task(service.call())
        assert (await call).endswith(b"ok")
        assert (await late).endswith(b"ok")
        address = service.address
        await serving
        with pytest.raises(OSError, match="refused|111"):
            await asyncio.open_connection(*address)


def test_without_a_socket_filter_the_backlog_is_limited(monkeypatch) -> None:
    monkeypatch.setattr(server, "_DROP_SYN", ((0, 0, 0, 0),))  # No return: not allowed.
    with socket.create_server(("127.0.0.1", 0), backlog=9) as listener:
        assert not server._drop_syn(listener)
        server._refuse_new_connections(listener.fileno())
        with socket.create_connection(listener.getsockname()), socket.socket() as late:
            late.settimeout(0.05)
            with pytest.raises(OSError, match="timed out"):
                late.connect(listener.getsockname())


@pytest.mark.parametrize("log_is_read", [True, False])
@in_skipped_time
async def test_a_second_signal_exits_with_its_status(log_is_read, monkeypatch) -> None:
    class Ended(BaseException):
        pass

    written = []

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "write", lambda descriptor, text: written.append((descriptor, text)))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(server, "has_event", lambda *_: log_is_read)
    service = Service(delay=10)
    service.server.handle_exit(signal.SIGTERM, None)
    with service.drain.track(), pytest.raises(Ended, match="130"):
        service.server.handle_exit(signal.SIGINT, None)
    text = b"second signal (SIGINT): ended at once, with 1 requests in work\n"
    assert written == [(2, text)] * log_is_read


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")],
)
@in_skipped_time
async def test_the_logged_url_can_be_called(host: str, shown: str) -> None:
    service = Service(host=host)
    try:
        with capture_logs() as log:
            async with service.running():
                url = service.server.url
                parts = urlsplit(url)
                with socket.create_connection((parts.hostname, parts.port)):
                    pass
                closing = GET.replace(b"Host", b"Connection: close\r\nHost")
                assert b"200 OK" in await asyncio.wait_for(service.call(closing), 10)
                await run_ready()
    except SystemExit:
        pytest.skip(f"{host} cannot be listened on here")
    assert url == f"http://{shown}:{url.rpartition(':')[2]}"
    assert {"event": "listening", "url": url, "log_level": "info"} in log

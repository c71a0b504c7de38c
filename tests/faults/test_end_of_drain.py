"""SIGTERM amid clients that never stop calling: nobody who was let in goes without an answer.

Each client sends until the port refuses it: on a new connection for every request or on a kept one,
with small and large bodies. Sent some hundreds: answered or refused with 503 `draining`, lost 0;
reset while connecting at most 2; exit status 0.
"""

import asyncio
import json
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field

from tests.faults.raw import head
from tests.support.server import RunningServer, run_server

CLIENTS = 64
SMALL = json.dumps({"sentences": ["search vector"], "return_colbert": False}).encode()
LARGE = json.dumps({"sentences": ["search" + " " * 300_000], "return_colbert": False}).encode()
PORT_CLOSED = (ConnectionRefusedError, ConnectionResetError)


@dataclass
class Calls:
    """What became of every call, and a place to wait until there were enough."""

    outcomes: Counter[str] = field(default_factory=Counter)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        if self.outcomes["200"] == 2 * CLIENTS:
            self.enough.set()


class Client:
    """Calls again and again until the port is closed."""

    def __init__(self, server: RunningServer, calls: Calls, body: bytes, *, keep: bool) -> None:
        self._address = server.url.removeprefix("http://").split(":")
        self._calls = calls
        self._request = head(len(body)) + body
        self._keep = keep
        if not keep:
            self._request = self._request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)

    async def call_until_refused(self) -> None:
        while True:
            try:
                streams = await asyncio.open_connection(*self._address)
            except PORT_CLOSED as error:
                self._calls.note(type(error).__name__)
                return
            try:
                await self._use(*streams)
            finally:
                streams[1].close()

    async def _use(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send requests on one connection as long as it lasts; its end between two is no loss."""
        while not reader.at_eof():
            try:
                writer.write(self._request)
                answer = await reader.readuntil(b"\r\n\r\n")
                length = answer.lower().partition(b"content-length: ")[2].split()[0]
                await reader.readexactly(int(length))
            except (ConnectionError, asyncio.IncompleteReadError):
                self._calls.note("lost")
                return
            self._calls.note(answer.split()[1].decode())
            if b"connection: close" in answer.lower():
                return


async def test_whoever_was_let_in_gets_an_answer(tiny_m3, tmp_path) -> None:
    with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3)) as server:
        server.wait_until_healthy()
        calls = Calls()
        clients = [
            Client(server, calls, LARGE if number % 4 == 3 else SMALL, keep=number % 2 == 0)
            for number in range(CLIENTS)
        ]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.call_until_refused())
            await calls.enough.wait()
            server.process.terminate()
        assert await asyncio.to_thread(server.process.wait, 30) == 0
    print(calls.outcomes)  # noqa: T201 - pytest shows it when asked to
    assert calls.outcomes["lost"] == 0, calls.outcomes
    assert calls.outcomes["ConnectionResetError"] <= 2, calls.outcomes
    assert set(calls.outcomes) <= {"200", "503", "lost", *(e.__name__ for e in PORT_CLOSED)}


async def test_a_refused_body_is_read_before_it_is_refused(faulty_server, open_gate) -> None:
    """The client sends its body while the service drains, and reads when it has sent it all."""
    with faulty_server(FAULTS="1:hold") as server:
        host, port = server.url.removeprefix("http://").split(":")
        held, held_writer = await asyncio.open_connection(host, port)
        held_writer.write(head(len(SMALL)) + SMALL)
        await asyncio.to_thread(server.wait_for_metric, "embedding_active_requests", 1)
        reader, writer = await asyncio.open_connection(host, port)
        with closing(held_writer), closing(writer):
            server.process.terminate()
            await asyncio.to_thread(server.wait_for_status, "/health", 503)
            writer.write(head(len(LARGE)) + LARGE[:1000])
            await asyncio.to_thread(server.wait_for_metric, "embedding_active_requests", 2)
            writer.write(LARGE[1000:])
            await writer.drain()
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503")
            assert b'"code":"draining"' in answer
            assert b"connection: close" in answer
            open_gate()
            assert (await held.read()).startswith(b"HTTP/1.1 200")
        assert await asyncio.to_thread(server.process.wait, 30) == 0


async def test_a_response_right_after_the_signal_announces_the_close(
    faulty_server, open_gate
) -> None:
    with faulty_server(FAULTS="1:hold") as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, port)
        with closing(writer):
            writer.write(head(len(SMALL)) + SMALL)
            await asyncio.to_thread(server.wait_for_metric, "embedding_active_requests", 1)
            server.process.terminate()
            await asyncio.to_thread(server.wait_for_status, "/health", 503)
            open_gate()
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer
        assert await asyncio.to_thread(server.process.wait, 30) == 0

"""SIGTERM: newcomers are refused, what was accepted is answered, and the process ends with 0."""

import asyncio
import json
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.faults.raw import address_of, head
from tests.faults.tally import EMBED, GOOD, Tally
from tests.support.server import RunningServer, run_server

WAITING, CLIENTS = 50, 64
SMALL, LARGE = (
    json.dumps(GOOD | {"sentences": ["search" + " " * spaces]}).encode() for spaces in (0, 300_000)
)
PORT_CLOSED = (ConnectionRefusedError, ConnectionResetError)


async def accept(server, client: httpx2.AsyncClient, tally: Tally) -> list[asyncio.Task]:
    """Let one request occupy the device and fifty wait for it."""
    requests = [asyncio.create_task(tally.post(client, *EMBED))]
    await asyncio.to_thread(server.wait_for_metric, "embedding_active_requests", 1)
    requests += [asyncio.create_task(tally.post(client, *EMBED)) for _ in range(WAITING)]
    await asyncio.to_thread(server.wait_for_metric, "embedding_queue_size", WAITING)
    return requests


async def test_under_load_nothing_that_was_accepted_is_lost(faulty_server, open_gate) -> None:
    """Sent 61: answered 51, refused 10 (draining), lost 0; exit status 0."""
    with faulty_server(FAULTS="1:hold") as server:
        accepted, late = Tally(), Tally()
        async with server.async_client() as client:
            requests = await accept(server, client, accepted)
            server.process.terminate()
            await asyncio.to_thread(server.wait_for_status, "/health", 503)
            assert (await client.get("/health")).json()["status"] == "draining"
            assert (await client.get("/health/live")).status_code == 200
            for _ in range(10):
                assert await late.post(client, *EMBED) == 503
            rejected = 'embedding_requests_rejected_total{reason="draining"}'
            assert server.metric(rejected) == 10
            open_gate()
            await asyncio.gather(*requests)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        assert (accepted.answered, accepted.lost) == (WAITING + 1, 0)
        assert (late.codes, late.lost) == ({"draining": 10}, 0)


async def test_what_takes_too_long_is_told_so_before_the_end(faulty_server) -> None:
    """Sent 51: refused 51 (draining, after nine tenths of SHUTDOWN_TIMEOUT), lost 0; status 0."""
    with faulty_server(FAULTS="1:hold", SHUTDOWN_TIMEOUT="1") as server:
        tally = Tally()
        async with server.async_client() as client:
            requests = await accept(server, client, tally)
            server.process.terminate()
            await asyncio.gather(*requests)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        assert (tally.refused, tally.lost) == (WAITING + 1, 0)
        assert tally.codes == {"draining": WAITING + 1}


async def test_a_second_signal_ends_the_process_at_once(faulty_server) -> None:
    with faulty_server(FAULTS="1:hold") as server:
        tally = Tally()
        async with server.async_client() as client:
            request = asyncio.create_task(tally.post(client, *EMBED))
            await asyncio.to_thread(server.wait_for_metric, "embedding_active_requests", 1)
            server.process.terminate()
            await asyncio.to_thread(server.wait_for_status, "/health", 503)
            server.process.send_signal(signal.SIGINT)
            assert await request == 0
        assert await asyncio.to_thread(server.process.wait, 60) == 128 + signal.SIGINT


async def test_with_a_delay_balancers_are_told_before_anything_is_refused(
    tiny_m3: Path, tmp_path: Path
) -> None:
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "SHUTDOWN_DELAY": "3600"}
    with run_server(tmp_path, **settings) as server:
        server.wait_until_healthy()
        tally = Tally()
        async with server.async_client() as client:
            server.process.terminate()
            await asyncio.to_thread(server.wait_for_status, "/health/ready", 503)
            assert (await client.get("/health")).json()["status"] == "draining"
            assert (await client.get("/health/live")).status_code == 200
            assert await tally.post(client, *EMBED) == 200
        server.process.terminate()
        assert await asyncio.to_thread(server.process.wait, 60) == 128 + signal.SIGTERM


async def call_until_refused(
    server: RunningServer,
    body: bytes,
    outcomes: Counter[str],
    enough: asyncio.Event,
    *,
    keeps: bool,
) -> None:
    """Call on kept connections or on new ones, until the port is closed."""
    request = head(len(body)) + body
    if not keeps:
        request = request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    while True:
        try:
            reader, writer = await asyncio.open_connection(*address_of(server))
        except PORT_CLOSED as error:
            outcomes[type(error).__name__] += 1
            return
        while not reader.at_eof():  # Its end between two requests is no loss.
            writer.write(request)
            try:
                answer = await reader.readuntil(b"\r\n\r\n")
                length = answer.lower().partition(b"content-length: ")[2].split()[0]
                await reader.readexactly(int(length))
            except (ConnectionError, asyncio.IncompleteReadError):
                outcomes["lost"] += 1
                break
            outcomes[answer.split()[1].decode()] += 1
            if outcomes["200"] == 2 * CLIENTS:
                enough.set()
            if b"connection: close" in answer.lower():
                break
        writer.close()


async def test_whoever_was_let_in_amid_clients_that_never_stop_calling_is_answered(
    tiny_m3: Path, tmp_path: Path
) -> None:
    outcomes: Counter[str] = Counter()
    enough = asyncio.Event()
    with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3)) as server:
        server.wait_until_healthy()
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                body, keeps = (LARGE if number % 4 == 3 else SMALL), number % 2 == 0
                calls = call_until_refused(server, body, outcomes, enough, keeps=keeps)
                group.create_task(calls)
            await enough.wait()
            server.process.terminate()
        assert await asyncio.to_thread(server.process.wait, 30) == 0
    assert outcomes["lost"] == 0, outcomes
    assert outcomes["ConnectionResetError"] <= 2, outcomes
    assert outcomes.keys() <= {"200", "503", "lost", *(each.__name__ for each in PORT_CLOSED)}


def test_as_pid_1_it_drains_too(tiny_m3: Path, tmp_path: Path) -> None:
    """As in a container: a process with number 1 gets no signal that it has no handler for."""
    namespace = ["unshare", "--pid", "--fork", "--kill-child"]
    if not works([*namespace, "true"]):
        pytest.skip("this machine lets nobody make a process namespace")
    with run_server(tmp_path, prefix=namespace, EMBEDDING_MODEL=str(tiny_m3)) as server:
        server.wait_until_healthy()
        (first,) = psutil.Process(server.process.pid).children()
        first.terminate()
        assert server.process.wait(30) == 0


def works(command: list[str]) -> bool:
    return bool(shutil.which(command[0])) and not subprocess.run(command, check=False).returncode

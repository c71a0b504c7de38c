"""SIGTERM: newcomers are refused, what was accepted is answered, and the process ends with 0."""

import asyncio
import shutil
import signal
import subprocess
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.faults.tally import EMBED, Tally
from tests.support.server import run_server

WAITING = 50


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
    with faulty_server(FAULTS="1:hold", SHUTDOWN_TIMEOUT="2") as server:
        tally = Tally()
        async with server.async_client() as client:
            requests = await accept(server, client, tally)
            server.process.terminate()
            await asyncio.gather(*requests)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        assert (tally.refused, tally.lost) == (WAITING + 1, 0)
        assert tally.codes == {"draining": WAITING + 1}


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_process_at_once(faulty_server, second) -> None:
    with faulty_server(FAULTS="1:hold") as server:
        tally = Tally()
        async with server.async_client() as client:
            request = asyncio.create_task(tally.post(client, *EMBED))
            await asyncio.to_thread(server.wait_for_metric, "embedding_active_requests", 1)
            server.process.terminate()
            await asyncio.to_thread(server.wait_for_status, "/health", 503)
            server.process.send_signal(second)
            assert await request == 0
        assert await asyncio.to_thread(server.process.wait, 60) == 128 + second


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


def test_after_the_delay_the_process_ends(tiny_m3: Path, tmp_path: Path) -> None:
    with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3), SHUTDOWN_DELAY="0.1") as server:
        server.wait_until_healthy()
        assert server.stop() == 0


def test_an_idle_process_ends_at_once(tiny_m3: Path, tmp_path: Path) -> None:
    with run_server(tmp_path, fresh=True, EMBEDDING_MODEL=str(tiny_m3)) as server:
        server.wait_until_healthy()
        assert server.stop() == 0


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

"""SIGTERM: new requests are refused, accepted ones are answered, and the exit status is 0."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx2

from tests.faults.raw import address_of, head
from tests.faults.tally import EMBED, GOOD, Tally
from tests.support.server import RunningServer
from tests.support.waiting import LIMIT

# A client may hold at most three quarters of the queue.
WAITING, PLACES, CLIENTS = 50, 67, 64
SMALL, LARGE = (
    json.dumps(GOOD | {"sentences": ["search" + " " * spaces]}).encode() for spaces in (0, 300_000)
)
EMBEDS = [
    ("/embeddings/", {"sentences": ["a"]}),
    ("/v1/embeddings", {"input": "a"}),
    ("/embeddings", {"input": "a"}),
    ("/v2/embed", {"texts": ["a"]}),
    ("/embed", {"inputs": "a"}),
    ("/api/v1/embed", {"inputs": "a"}),
]
RERANKS = [
    ("/rerank", {"query": "a", "documents": ["a"]}),
    ("/rerank", {"query": "a", "texts": ["a"]}),
]
PORT_CLOSED = (ConnectionRefusedError, ConnectionResetError)


async def accept(server, client: httpx2.AsyncClient, tally: Tally) -> list[asyncio.Task]:
    """Let one request occupy the device and fifty wait for it."""
    requests = [asyncio.create_task(tally.post(client, *EMBED))]
    await asyncio.to_thread(server.wait_for_metric, "embedding_active_requests", 1)
    requests += [asyncio.create_task(tally.post(client, *EMBED)) for _ in range(WAITING)]
    await asyncio.to_thread(server.wait_for_metric, "embedding_queue_size", WAITING)
    return requests


def message_of(answer: httpx2.Response) -> str:
    """Return the message of an error from the member that clients of that path read."""
    body = answer.json()
    error = body.get("error")
    if isinstance(error, dict):
        return error["message"]
    return error or body.get("message") or body["detail"]


async def refused(
    client: httpx2.AsyncClient, requests: list[tuple[str, dict]], why: str
) -> list[int]:
    """Return the statuses of requests that are all refused with `Retry-After`."""
    answers = await asyncio.gather(*(client.post(path, json=body) for path, body in requests))
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert all(why in message_of(answer) for answer in answers)
    return [answer.status_code for answer in answers]


async def test_drain_answers_accepted_requests_and_refuses_others_in_each_dialect(
    serve, tmp_path: Path
) -> None:
    rejected, hold = "embedding_requests_rejected_total", tmp_path / "hold"
    settings = {"HOLD": str(hold), "MAX_QUEUE_SIZE": str(PLACES)}
    with serve("tests.faults.faulty_server", **settings) as server:
        hold.touch()
        accepted = Tally()
        async with server.async_client() as client:
            requests = await accept(server, client, accepted)
            statuses = await refused(client, EMBEDS, "MAX_QUEUE_SIZE")
            assert statuses == [503, 503, 503, 503, 429, 429]
            assert server.metric(f'{rejected}{{reason="backpressure"}}') == len(EMBEDS)
            server.process.terminate()
            await asyncio.to_thread(server.wait_for_status, "/health", 503)
            assert (await client.get("/health")).json()["status"] == "draining"
            assert (await client.get("/health/live")).status_code == 200
            assert await refused(client, EMBEDS + RERANKS, "shutting down") == [503] * 8
            assert server.metric(f'{rejected}{{reason="draining"}}') == len(EMBEDS)
            hold.unlink()
            await asyncio.gather(*requests)
        assert await asyncio.to_thread(server.process.wait, LIMIT) == 0
        assert (accepted.answered, accepted.lost) == (WAITING + 1, 0)


async def call_until_refused(
    server: RunningServer,
    body: bytes,
    outcomes: Counter[str],
    enough: asyncio.Event,
    *,
    keeps: bool,
) -> None:
    """Send requests on kept or on new connections, until the port is closed."""
    request = head(len(body)) + body
    if not keeps:
        request = request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    while True:
        try:
            reader, writer = await asyncio.open_connection(*address_of(server))
        except PORT_CLOSED as error:
            outcomes[type(error).__name__] += 1
            return
        while not reader.at_eof():  # A connection that is closed between requests loses nothing.
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


async def test_drain_loses_no_request_of_clients_that_keep_sending(serve) -> None:
    outcomes: Counter[str] = Counter()
    enough = asyncio.Event()
    with serve() as server:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                body, keeps = (LARGE if number % 4 == 3 else SMALL), number % 2 == 0
                calls = call_until_refused(server, body, outcomes, enough, keeps=keeps)
                group.create_task(calls)
            await enough.wait()
            server.process.terminate()
        assert await asyncio.to_thread(server.process.wait, LIMIT) == 0
    assert outcomes["lost"] == 0, outcomes
    assert outcomes["ConnectionResetError"] <= 2, outcomes
    assert outcomes.keys() <= {"200", "503", "lost", *(error.__name__ for error in PORT_CLOSED)}

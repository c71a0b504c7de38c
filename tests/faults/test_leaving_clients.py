"""Clients that leave before their answer cost nobody a forward."""

import asyncio
import json

from tests.faults.raw import head
from tests.faults.tally import EMBED, Tally

LEAVING = 500


def raw_request() -> bytes:
    body = json.dumps(EMBED[1]).encode()
    return head(len(body)) + body


async def send(server) -> asyncio.StreamWriter:
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw_request())
    await writer.drain()
    return writer


async def test_five_hundred_leave_while_they_wait(faulty_server, open_gate) -> None:
    """Sent 501: 500 left and cost no forward, answered 1, lost 0; healthy before and after."""
    with faulty_server(FAULTS="1:hold", MAX_QUEUE_SIZE="1000") as server:
        tally = Tally()
        async with server.async_client() as client:
            held = asyncio.create_task(tally.post(client, *EMBED))
            await asyncio.to_thread(server.wait_for_metric, "embedding_active_requests", 1)
            writers = [await send(server) for _ in range(LEAVING)]
            await asyncio.to_thread(server.wait_for_metric, "embedding_queue_size", LEAVING)
            for writer in writers:
                writer.close()
            await asyncio.to_thread(
                server.wait_for_metric, "embedder_abandoned_requests_total", LEAVING
            )
            assert server.metric("embedding_queue_size") == 0
            open_gate()
            assert await held == 200
            assert (await client.get("/health")).status_code == 200
        assert tally.lost == 0
        assert server.metric("embedding_batch_size_count") == 1
        assert server.metric("embedding_active_requests") == 0


async def test_one_that_leaves_during_its_forward_is_forgotten(faulty_server, open_gate) -> None:
    """Sent 2: 1 left, answered 1, lost 0."""
    with faulty_server(FAULTS="1:hold") as server:
        writer = await send(server)
        await asyncio.to_thread(server.wait_for_metric, "embedding_active_requests", 1)
        writer.close()
        await asyncio.to_thread(server.wait_for_metric, "embedder_abandoned_requests_total", 1)
        tally = Tally()
        async with server.async_client() as client:
            following = asyncio.create_task(tally.post(client, *EMBED))
            open_gate()
            assert await following == 200
            total = (await client.get("/stats")).json()["total_requests"]
        assert (tally.lost, total) == (0, 1)

"""Clients that leave before their answer cost nobody a forward."""

import asyncio
import json

from tests.faults.raw import address_of, head
from tests.faults.tally import EMBED, Tally

LEAVING = 500


async def send(server) -> asyncio.StreamWriter:
    body = json.dumps(EMBED[1]).encode()
    _, writer = await asyncio.open_connection(*address_of(server))
    writer.write(head(len(body)) + body)
    await writer.drain()
    return writer


async def test_one_leaves_during_its_forward_and_five_hundred_while_they_wait(
    faulty_server, open_gate
) -> None:
    """Sent 502: 501 left and cost no forward but the one that had begun, answered 1, lost 0."""
    with faulty_server(FAULTS="1:hold", MAX_QUEUE_SIZE="1000") as server:
        tally = Tally()
        async with server.async_client() as client:
            writers = [await send(server)]
            await asyncio.to_thread(server.wait_for_metric, "embedder_queue_wait_seconds_count", 1)
            writers += [await send(server) for _ in range(LEAVING)]
            await asyncio.to_thread(server.wait_for_metric, "embedding_queue_size", LEAVING)
            stays = asyncio.create_task(tally.post(client, *EMBED))
            await asyncio.to_thread(server.wait_for_metric, "embedding_queue_size", LEAVING + 1)
            for writer in writers:
                writer.close()
            abandoned = "embedder_abandoned_requests_total"
            await asyncio.to_thread(server.wait_for_metric, abandoned, LEAVING + 1)
            assert server.metric("embedding_queue_size") == 1
            open_gate()
            assert await stays == 200
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/stats")).json()["total_requests"] == 1
        assert tally.lost == 0
        assert server.metric("embedding_batch_size_count") == 2
        assert server.metric("embedding_active_requests") == 0

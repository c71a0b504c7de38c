"""A storm of two hundred requests: what clients saw, /stats and Prometheus agree to the last."""

import asyncio
import random
from functools import partial
from pathlib import Path

import httpx2

from tests.faults.tally import Tally
from tests.support.server import RunningServer

SENTENCES = ["search vector music history " * 6] * 6
STORM = (
    [("/embeddings/", {"sentences": SENTENCES, "return_colbert": False})] * 140
    + [("/rerank", {"query": "search", "passages": SENTENCES})] * 40
    + [("/embeddings/", {"sentences": 1})] * 12
    + [("/rerank", {"query": " ", "passages": ["a"]})] * 8
)
PATHS = ("/embeddings/", "/rerank")


async def send(client: httpx2.AsyncClient, path: str) -> Tally:
    tally = Tally()
    async with asyncio.TaskGroup() as group:
        for target, body in random.Random(0).sample(STORM, len(STORM)):  # Of mixed kinds.
            if target == path:
                group.create_task(tally.post(client, target, body))
    return tally


def counted(server: RunningServer, name: str) -> int:
    """The sum of a counter over its labels, as Prometheus would scrape it."""
    lines = server.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{")))


async def test_two_hundred_requests_at_once(faulty_server, tmp_path: Path) -> None:
    """Sent 200: answered or refused with the true reason each, lost 0; healthy afterwards."""
    hold = tmp_path / "hold"
    places = {"MAX_QUEUE_SIZE": "40", "RERANK_MAX_QUEUE": "8"}
    with faulty_server(HOLD=str(hold), **places) as server:
        hold.touch()  # Nothing is computed until some of each kind are refused.
        async with server.async_client(connections=200) as client:
            async with asyncio.TaskGroup() as group:
                storms = [group.create_task(send(client, path)) for path in PATHS]
                for kind in ("embedding", "rerank"):
                    refused = partial(counted, server, f"{kind}_requests_rejected_total")
                    await asyncio.to_thread(server.wait_for_more, refused, 0)
                hold.unlink()
            embed, rerank = (storm.result() for storm in storms)
            stats = (await client.get("/stats")).json()
            health = (await client.get("/health")).status_code
        told = (embed.codes, rerank.codes)
        assert (embed.sent + rerank.sent, embed.lost, rerank.lost) == (200, 0, 0), told
        assert health == 200
        for tally, kind in ((embed, "embedding"), (rerank, "rerank")):
            full = tally.codes["queue_full"]
            reason = f'{kind}_requests_rejected_total{{reason="backpressure"}}'
            assert server.metric(reason) == full == len(tally.retry_after)
            assert full > 0
            assert counted(server, f"{kind}_requests_rejected_total") == full
            assert counted(server, f"{kind}_requests_total") == tally.sent - full
            assert min(tally.retry_after) >= 1
        assert server.metric("embedding_sentences_processed_total") == embed.answered * 6
        assert server.metric("rerank_pairs_processed_total") == rerank.answered * 6
        full = embed.codes["queue_full"] + rerank.codes["queue_full"]
        assert stats["rejected_requests"] == full
        assert stats["total_requests"] == 200 - full
        assert stats["total_sentences"] == embed.answered * 6
        for gauge in (
            "embedding_queue_size",
            "embedding_active_requests",
            "rerank_active_requests",
        ):
            assert server.metric(gauge) == 0

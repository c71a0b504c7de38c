"""A storm of eight hundred requests: what clients saw, /stats and Prometheus agree to the last."""

import asyncio
import random
from pathlib import Path

import httpx2

from tests.faults.tally import Tally
from tests.support.server import RunningServer, run_server

SENTENCES = ["search vector music history " * 6] * 6
STORM = (
    [("/embeddings/", {"sentences": SENTENCES, "return_colbert": False})] * 600
    + [("/rerank", {"query": "search", "passages": SENTENCES})] * 160
    + [("/embeddings/", {"sentences": 1})] * 24
    + [("/rerank", {"query": " ", "passages": ["a"]})] * 16
)


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


async def test_eight_hundred_requests_at_once(tiny_m3: Path, tmp_path: Path) -> None:
    """Sent 800: answered or refused with the true reason each, lost 0; healthy afterwards."""
    with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3)) as server:
        server.wait_until_healthy()
        async with server.async_client(connections=700) as client:
            embed, rerank = await asyncio.gather(
                send(client, "/embeddings/"), send(client, "/rerank")
            )
            stats = (await client.get("/stats")).json()
            health = (await client.get("/health")).status_code
        told = (embed.codes, rerank.codes)
        assert (embed.sent + rerank.sent, embed.lost, rerank.lost) == (800, 0, 0), told
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
        assert stats["total_requests"] == 800 - full
        assert stats["total_sentences"] == embed.answered * 6
        for gauge in (
            "embedding_queue_size",
            "embedding_active_requests",
            "rerank_active_requests",
        ):
            assert server.metric(gauge) == 0

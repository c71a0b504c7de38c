"""A client with many connections does not starve one that sends a request now and then.

Bob sends 8 small requests, one at a time, and all are answered. Alice sends bulk on 120
connections: her requests are answered, or refused if the queue is full; none is lost.
"""

import asyncio
from pathlib import Path

import httpx2

from tests.faults.tally import EMBED, Tally

CONNECTIONS = 120
# Fewer than Alice has connections.
PLACES = {"MAX_QUEUE_SIZE": "10"}
SMALL_REQUESTS = 4
TEXTS = ["search vector music history river bread " * 7] * 16
BULK = [
    ("/embeddings/", {"sentences": TEXTS, "return_colbert": False}),
    ("/embeddings/", {"sentences": TEXTS, "return_sparse": False, "return_colbert": False}),
    ("/rerank", {"query": "search", "passages": TEXTS}),
]
SMALL = [EMBED, ("/rerank", {"query": "search", "passages": ["vector", "music"]})]


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-secret-of-the-test"}


async def send_bulk(client, outcomes: Tally, refused: asyncio.Event, over: asyncio.Event):
    """Send one request after the other on one connection, whatever the responses."""
    while not over.is_set():
        path, body = BULK[outcomes.sent % len(BULK)]
        if await outcomes.post(client, path, body, **bearer("alice")) == 503:
            refused.set()


async def test_small_requests_are_answered_beside_bulk_of_another_client(
    serve, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:alice-secret-of-the-test\nbob:bob-secret-of-the-test\n")
    alice, bob = Tally(), Tally()
    refused, over = asyncio.Event(), asyncio.Event()
    with serve(MAX_BATCH_TOKENS="2048", API_TOKENS_FILE=str(tokens), **PLACES) as server:
        async with server.async_client(CONNECTIONS + 1) as client, asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(send_bulk(client, alice, refused, over))
            await refused.wait()
            await ask_small(client, bob)
            over.set()
        assert server.get("/health").status_code == 200
    assert (bob.answered, bob.sent) == (bob.sent, SMALL_REQUESTS * len(SMALL)), bob
    assert (alice.lost, alice.failed) == (0, 0), alice
    assert alice.codes.keys() == {"queue_full"}
    assert alice.answered > 0


async def ask_small(client: httpx2.AsyncClient, bob: Tally) -> None:
    for path, body in SMALL * SMALL_REQUESTS:
        await bob.post(client, path, body, **bearer("bob"))

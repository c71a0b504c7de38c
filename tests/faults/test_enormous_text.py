"""Texts of many megabytes hold up each other and nobody else, and cost little memory."""

import asyncio
import resource
import sys
from collections.abc import Iterator

import pytest

from tests.faults.tally import EMBED, Tally
from tests.support.memory import status_bytes
from tests.support.server import RunningServer

# Each of these texts is counted to its end.
ENORMOUS = {"sentences": ["search vector " * 25_000] * 15, "return_colbert": False}


@pytest.fixture(scope="module")
def short(serve) -> Iterator[RunningServer]:
    """Texts are cut to 64 tokens, so that memory goes to tokenising and not to forwards."""
    with serve(MAX_INPUT_LENGTH="64") as running:
        yield running


async def test_enormous_requests_do_not_hold_up_a_sentence(short: RunningServer) -> None:
    """Sent 13: answered 13, the sentences first, lost 0."""
    outcomes = Tally()
    async with short.async_client() as client:
        enormous = [
            asyncio.create_task(outcomes.post(client, "/embeddings/", ENORMOUS)) for _ in range(3)
        ]
        await asyncio.to_thread(short.wait_for_metric, "embedding_queue_size", 3)
        for _ in range(10):
            assert await outcomes.post(client, *EMBED) == 200
        assert not any(task.done() for task in enormous)
        assert await asyncio.gather(*enormous) == [200, 200, 200]
    assert outcomes.lost == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a running process")
@pytest.mark.parametrize(
    ("text", "count", "tokens"), [("ﷺ" * 7_000, 14, 63_000), (". " * 30_000, 14, 60_000)]
)
async def test_texts_of_many_tokens_cost_at_most_20_times_its_body(
    short: RunningServer, text: str, count: int, tokens: int
) -> None:
    """Sent 4: answered 4, every token counted.

    The system refuses the process more than that, which would end it.
    """
    outcomes = Tally()
    body = {"sentences": [text] * count, "return_colbert": False, "return_sparse": False}
    async with short.async_client() as client:
        for _ in range(2):
            assert await outcomes.post(client, *EMBED) == 200
        limit_growth(short, 20 * count * len(text.encode()) + 50 * 2**20)
        answer = await client.post("/embeddings/", json=body)
        assert await outcomes.post(client, *EMBED) == 200
    counted = [warning["details"]["original_tokens"] for warning in answer.json()["warnings"]]
    assert len(counted) == count
    assert min(counted) >= tokens


def limit_growth(server: RunningServer, allowed: int) -> None:
    """Let the process have so many bytes more than it has now."""
    limit = status_bytes(server.process.pid, "VmData") + allowed
    resource.prlimit(server.process.pid, resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))

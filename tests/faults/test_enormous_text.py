"""Texts of many megabytes hold up each other and nobody else."""

import asyncio

from tests.faults.outcomes import EMBED, Outcomes

ENORMOUS = {"sentences": ["search vector " * 600_000], "return_colbert": False}


async def test_enormous_texts_do_not_hold_up_a_sentence(server) -> None:
    """Sent 23: answered 23, the sentences first, lost 0."""
    outcomes = Outcomes()
    async with server.async_client() as client:
        enormous = [
            asyncio.create_task(outcomes.post(client, "/embeddings/", ENORMOUS)) for _ in range(3)
        ]
        await asyncio.to_thread(server.wait_for_metric, "embedding_queue_size", 3)
        for _ in range(20):
            assert await outcomes.post(client, *EMBED) == 200
        assert not any(task.done() for task in enormous)
        assert await asyncio.gather(*enormous) == [200, 200, 200]
    assert outcomes.lost == 0

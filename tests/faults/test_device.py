"""A device that raises, dies, hangs or has too little memory costs only what it had in hand."""

import asyncio

import pytest

from smart_embedder.models.device.cpu import available_threads
from tests.faults.tally import EMBED, Tally, post_many

EMBED_MANY = {"return_dense": True, "return_sparse": False, "return_colbert": False}


def health(server) -> int:
    with server.client() as client:
        return client.get("/health").status_code


@pytest.mark.parametrize("fault", ["raise", "exit"])
async def test_an_error_or_the_end_of_the_thread_fails_that_request_alone(
    faulty_server, fault
) -> None:
    """Sent 10: answered 9, failed 1, lost 0; healthy before and after."""
    with faulty_server(FAULTS=f"3:{fault}") as server:
        async with server.async_client() as client:
            tally = await post_many(client, 10)
        assert (tally.answered, tally.failed, tally.lost) == (9, 1, 0)
        assert tally.codes == {"inference_failed": 1}
        assert health(server) == 200
        assert server.stop() == 0


async def test_a_device_that_has_failed_for_good_turns_liveness_red(faulty_server) -> None:
    """Sent 4: answered 2, refused 2 (503), lost 0; no device is left to serve."""
    with faulty_server(FAULTS="3:lose") as server:
        async with server.async_client() as client:
            tally = await post_many(client, 4)
            assert (tally.answered, tally.refused, tally.lost) == (2, 2, 0)
            assert tally.codes == {"unhealthy": 2}
            live = await client.get("/health/live")
            assert live.status_code == 503
            assert "every device has failed" in live.json()["reason"]
            ready = (await client.get("/health")).json()
            assert (ready["status"], ready["gpu"]["failed_devices"]) == ("unhealthy", ["cpu"])
        assert server.stop() == 0


@pytest.mark.skipif(available_threads() < 2, reason="one core cannot be shared")
async def test_a_worker_that_fails_for_good_gives_its_batch_to_another(faulty_server) -> None:
    """Sent 8: answered 8, lost 0; the service stays healthy and names the worker that failed."""
    with faulty_server(FAULTS="3:lose", DEVICE="cpu:0,cpu:1") as server:
        async with server.async_client() as client:
            tally = await post_many(client, 8)
            assert (tally.answered, tally.lost) == (8, 0)
            health = (await client.get("/health")).json()
        assert (health["status"], health["gpu"]["failed_devices"]) == ("healthy", ["cpu:0"])
        assert server.stop() == 0


@pytest.mark.skipif(available_threads() < 2, reason="one core cannot be shared")
async def test_a_batch_at_which_a_worker_crashed_is_given_to_no_other(faulty_server) -> None:
    """Sent 8: answered 7, failed 1, lost 0; the service stays healthy without the worker."""
    with faulty_server(FAULTS="3:crash", DEVICE="cpu:0,cpu:1") as server:
        async with server.async_client() as client:
            tally = await post_many(client, 8)
            assert (tally.answered, tally.failed, tally.lost) == (7, 1, 0)
            assert tally.codes == {"inference_failed": 1}
            health = (await client.get("/health")).json()
        assert (health["status"], health["gpu"]["failed_devices"]) == ("healthy", ["cpu:0"])
        assert server.stop() == 0


async def test_a_stuck_device_turns_liveness_red_until_it_comes_back(
    faulty_server, open_gate
) -> None:
    """Sent 4: failed 1 (504), refused 1 (503), answered 2 after the device came back, lost 0."""
    with faulty_server(FAULTS="1:hold", GPU_PROCESS_TIMEOUT="1") as server:
        tally = Tally()
        async with server.async_client() as client:
            assert await tally.post(client, *EMBED) == 504
            await asyncio.to_thread(server.wait_for_status, "/health/live", 503)
            live = (await client.get("/health/live")).json()
            assert "has not come back" in live["reason"]
            assert server.metric("embedder_device_stuck_seconds") > 2
            ready = await client.get("/health")
            assert (ready.status_code, ready.json()["status"]) == (503, "unhealthy")
            assert await tally.post(client, *EMBED) == 503
            open_gate()
            await asyncio.to_thread(server.wait_for_status, "/health/live", 200)
            assert server.metric("embedder_device_stuck_seconds") == 0
            assert await tally.post(client, *EMBED) == 200
            assert await tally.post(client, *EMBED) == 200
        assert tally.lost == 0
        assert tally.codes == {"timeout": 1, "unhealthy": 1}
        timeouts = 'embedding_requests_total{endpoint="/embeddings/",status="timeout"}'
        assert server.metric(timeouts) == 1
        assert health(server) == 200


def test_a_process_whose_device_is_stuck_can_still_be_stopped(faulty_server) -> None:
    with faulty_server(FAULTS="1:hold", GPU_PROCESS_TIMEOUT="0.2", SHUTDOWN_TIMEOUT="1") as server:
        with server.client() as client:
            assert client.post(EMBED[0], json=EMBED[1]).status_code == 504
        assert server.stop() == 0


async def test_who_is_refused_is_told_when_the_running_forward_is_over(
    faulty_server, open_gate
) -> None:
    """Sent 3: answered 2, refused 1 (503), lost 0."""
    slow = {"FAULTS": "1:hold", "SECONDS_PER_TOKEN": "10", "MAX_QUEUE_SIZE": "1"}
    with faulty_server(**slow) as server:
        async with server.async_client() as client:
            held = asyncio.create_task(client.post(EMBED[0], json=EMBED[1]))
            await asyncio.to_thread(server.wait_for_metric, "embedding_active_requests", 1)
            await asyncio.to_thread(server.wait_for_metric, "embedding_queue_size", 0)
            waits = asyncio.create_task(client.post(EMBED[0], json=EMBED[1]))
            await asyncio.to_thread(server.wait_for_metric, "embedding_queue_size", 1)
            refused = await client.post(EMBED[0], json=EMBED[1])
            assert (refused.status_code, refused.json()["code"]) == (503, "queue_full")
            assert 2 <= int(refused.headers["Retry-After"]) <= 30
            open_gate()
            assert (await held).status_code == (await waits).status_code == 200


async def test_a_batch_that_does_not_fit_is_split_until_it_does(faulty_server) -> None:
    """Sent 3: answered 2, refused 1 (its single text does not fit), lost 0; healthy throughout."""
    with faulty_server(MEMORY_TOKENS="40", MAX_BATCH_TOKENS="1000") as server:
        tally = Tally()
        fitting = {"sentences": ["search vector"] * 60} | EMBED_MANY
        too_long = {"sentences": ["search vector " * 40]} | EMBED_MANY
        async with server.async_client() as client:
            assert await tally.post(client, "/embeddings/", fitting) == 200
            splits = server.metric("embedder_out_of_memory_splits_total")
            assert splits > 0
            assert await tally.post(client, "/embeddings/", too_long) == 503
            assert await tally.post(client, *EMBED) == 200
        assert tally.lost == 0
        assert tally.codes == {"out_of_memory": 1}
        assert server.metric("embedder_out_of_memory_splits_total") == splits
        assert health(server) == 200

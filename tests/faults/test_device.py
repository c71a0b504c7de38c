"""A device that raises, dies or hangs costs only what it had in hand."""

import asyncio

import pytest

from smart_embedder.models.device.cpu import available_threads
from tests.faults.tally import EMBED, Tally, post_many

two_cores = pytest.mark.skipif(available_threads() < 2, reason="one core cannot be shared")
TWO = "cpu:0,cpu:1"
ALONE = {"inference_failed": 1}


@pytest.mark.parametrize(
    ("fault", "devices", "codes", "failed"),
    [
        pytest.param("raise", "cpu", ALONE, [], id="an error fails its request alone"),
        pytest.param("exit", "cpu", ALONE, [], id="so does the end of the thread"),
        pytest.param("lose", "cpu", {"unhealthy": 6}, ["cpu"], id="the last one that fails"),
        pytest.param("lose", TWO, {}, ["cpu:0"], marks=two_cores, id="another one goes on"),
        pytest.param("crash", TWO, ALONE, ["cpu:0"], marks=two_cores, id="but with no culprit"),
    ],
)
async def test_the_third_forward_goes_wrong(faulty_server, fault, devices, codes, failed) -> None:
    """Sent 8, none lost; the service is healthy for as long as it has a device."""
    with faulty_server(FAULTS=f"3:{fault}", DEVICE=devices) as server:
        async with server.async_client() as client:
            tally = await post_many(client, 8)
            health = await client.get("/health")
            live = await client.get("/health/live")
        assert (tally.codes, tally.answered, tally.lost) == (codes, 8 - sum(codes.values()), 0)
        is_over = failed == [devices]
        status = (503, "unhealthy") if is_over else (200, "healthy")
        assert (health.status_code, health.json()["status"]) == status
        assert health.json()["gpu"]["failed_devices"] == failed
        assert live.status_code == status[0]
        assert ("every device has failed" in live.text) == is_over
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
            assert (await client.get("/health")).status_code == 200
        assert tally.codes == {"timeout": 1, "unhealthy": 1}
        timeouts = 'embedding_requests_total{endpoint="/embeddings/",status="timeout"}'
        assert server.metric(timeouts) == 1

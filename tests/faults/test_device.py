"""A device that hangs or fails permanently: the responses of a real process.

tests/smart_embedder/devices has the tests of single forwards that fail.
"""

import asyncio
from pathlib import Path

from tests.faults.tally import EMBED, Tally


async def test_stuck_device_fails_liveness_until_it_comes_back(serve, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    settings = {"HOLD": str(hold), "GPU_PROCESS_TIMEOUT": "2"}
    with serve("tests.faults.faulty_server", **settings) as server:
        tally = Tally()
        async with server.async_client() as client:
            hold.touch()
            assert await tally.post(client, *EMBED) == 504
            await asyncio.to_thread(server.wait_for_status, "/health/live", 503)
            live = (await client.get("/health/live")).json()
            assert "has not come back" in live["reason"]
            assert server.metric("embedder_device_stuck_seconds") > 2
            ready = await client.get("/health")
            assert (ready.status_code, ready.json()["status"]) == (503, "unhealthy")
            assert await tally.post(client, *EMBED) == 503
            hold.unlink()
            await asyncio.to_thread(server.wait_for_status, "/health/live", 200)
            assert server.metric("embedder_device_stuck_seconds") == 0
            assert await tally.post(client, *EMBED) == 200
            assert (await client.get("/health")).status_code == 200
        assert tally.codes == {"timeout": 1, "unhealthy": 1}
        timeouts = 'embedding_requests_total{endpoint="/embeddings/",status="timeout"}'
        assert server.metric(timeouts) == 1


async def test_failed_device_fails_health_and_liveness(serve, tmp_path) -> None:
    broken = tmp_path / "broken"
    with serve("tests.faults.faulty_server", BREAK=str(broken)) as server:
        tally = Tally()
        async with server.async_client() as client:
            assert await tally.post(client, *EMBED) == 200
            broken.touch()
            for _ in range(2):
                assert await tally.post(client, *EMBED) == 503
            health, live = await client.get("/health"), await client.get("/health/live")
        assert tally.codes == {"unhealthy": 2}
        assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
        assert health.json()["gpu"]["failed_devices"] == ["cpu"]
        assert (live.status_code, "every device has failed" in live.text) == (503, True)
        assert server.stop() == 0

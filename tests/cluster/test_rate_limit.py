"""Replicas on Ray Serve count a client together."""

from pathlib import Path

import httpx2
import pytest

from tests.cluster.ray_cluster import LIMIT, RayCluster
from tests.cluster.serving import ask, serving
from tests.support.redis_server import needs_redis, run_redis

# The cluster starts, and then the service in it.
pytestmark = pytest.mark.timeout(5 * LIMIT)


@needs_redis
def test_replicas_share_a_rate_limit_through_redis(
    cluster: RayCluster, tiny_m3: Path, tmp_path: Path
) -> None:
    limits = {"RATE_LIMIT_REQUESTS_PER_MINUTE": "1", "RATE_LIMIT_BURST_SIZE": "6"}
    with (
        run_redis(tmp_path) as redis,
        serving(cluster, tiny_m3, RATE_LIMIT_STORE=redis.url, **limits) as url,
        httpx2.Client(base_url=url, timeout=LIMIT) as client,
    ):
        statuses = [ask(client) for _ in range(30)]
    assert statuses.count(200) == 6
    assert statuses.count(429) == 24

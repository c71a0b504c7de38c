"""The example of Ray Serve: two replicas that serve the whole service."""

from pathlib import Path

import httpx2
import pytest

from tests.deploy.ray.ray_cluster import LIMIT, RayCluster, ask, serving
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3 * LIMIT)]


def test_two_replicas_serve_the_whole_service(cluster: RayCluster, tiny_m3: Path) -> None:
    with (
        serving(cluster, tiny_m3) as url,
        httpx2.Client(base_url=url, headers={"Connection": "close"}, timeout=LIMIT) as client,
    ):
        answered: set[int] = set()

        def both_answer() -> bool:
            assert ask(client, "one-of-both") == 200
            logs = {pid: cluster.read_log(pid) for pid in cluster.replicas()}
            answered.update(pid for pid, log in logs.items() if "one-of-both" in log)
            return len(answered) == 2

        wait_until(both_answer, "two replicas answer")
        answer = client.post("/v1/embeddings", json={"input": "a", "model": "tiny-m3"})
        assert len(answer.json()["data"][0]["embedding"])
        named = client.post(
            "/embeddings/", json={"sentences": []}, headers={"X-Request-ID": "mine"}
        )
        assert named.status_code == 400
        assert named.headers.get_list("x-request-id") == ["mine"]
        assert named.json()["request_id"] == "mine"

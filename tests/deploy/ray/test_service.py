"""The service on Ray Serve: killed and hanging replicas, and autoscaling."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import httpx2
import pytest

from tests.deploy.ray.ray_cluster import LIMIT, RayCluster, ask, serving
from tests.support.waiting import running, wait_until

# Several waits of up to LIMIT each.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(5 * LIMIT)]

CLIENTS = 8


class Load:
    """Clients that send requests one after another; `statuses` by request id."""

    def __init__(self, url: str, name: str, clients: int = CLIENTS) -> None:
        self._url = url
        self._name = name
        self._numbers = count()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(clients)]
        self.statuses: dict[str, int] = {}

    def _send(self) -> None:
        with httpx2.Client(base_url=self._url, timeout=LIMIT) as client:
            while not self._stop.is_set():
                request = f"{self._name}-{next(self._numbers)}"
                self.statuses[request] = ask(client, request)

    @contextmanager
    def running(self) -> Iterator["Load"]:
        with running(self._threads, self._stop, LIMIT):
            yield self

    def wait_for_more(self, answers: int) -> None:
        """Wait for this many more responses."""
        before = len(self.statuses)
        wait_until(lambda: len(self.statuses) >= before + answers, f"{answers} answers")

    @property
    def failed(self) -> set[str]:
        return {request for request, status in self.statuses.items() if status != 200}


@pytest.fixture(scope="module")
def service(cluster: RayCluster, tiny_m3: Path):
    with serving(cluster, tiny_m3) as url:
        yield url


def answered(cluster: RayCluster, pid: int) -> set[str]:
    """Return the requests that a replica has logged as answered."""
    lines = (line for line in cluster.read_log(pid).splitlines() if line.startswith("{"))
    events = (json.loads(line) for line in lines)
    return {event["request_id"] for event in events if event.get("path") == "/embeddings/"}


def two_that_answer(cluster: RayCluster, url: str) -> None:
    """Wait until two replicas answer without failures."""
    numbers = count()

    def settled() -> bool:
        with Load(url, f"settle-{next(numbers)}").running() as load:
            load.wait_for_more(40)
        by = [answered(cluster, pid) & load.statuses.keys() for pid in cluster.replicas()]
        return not load.failed and sum(bool(statuses) for statuses in by) >= 2

    wait_until(settled, "two replicas answer")


def wait_for_two(cluster: RayCluster) -> None:
    wait_until(lambda: len(cluster.replicas()) == 2, "two replicas")


def test_two_replicas_serve_the_whole_service(cluster: RayCluster, service: str) -> None:
    two_that_answer(cluster, service)
    with httpx2.Client(base_url=service) as client:
        answer = client.post("/v1/embeddings", json={"input": "a", "model": "tiny-m3"})
        assert len(answer.json()["data"][0]["embedding"])
        named = client.post(
            "/embeddings/", json={"sentences": []}, headers={"X-Request-ID": "mine"}
        )
        assert named.status_code == 400
        assert named.headers.get_list("x-request-id") == ["mine"]
        assert named.json()["request_id"] == "mine"


def test_killed_replica_does_not_affect_requests_of_others(
    cluster: RayCluster, service: str
) -> None:
    wait_for_two(cluster)
    first, *others = cluster.replicas().values()
    with Load(service, "killed").running() as load:
        load.wait_for_more(100)
        first.kill()
        load.wait_for_more(200)
    # Only requests of the killed replica failed, and none that another has answered.
    assert len(load.failed) <= CLIENTS
    assert {load.statuses[request] for request in load.failed} <= {500, 503}
    for pid in cluster.replicas():
        assert not answered(cluster, pid) & load.failed
    assert any(answered(cluster, replica.pid) & load.statuses.keys() for replica in others)
    two_that_answer(cluster, service)
    assert first.pid not in cluster.replicas()


def test_hanging_replica_is_replaced(cluster: RayCluster, service: str) -> None:
    wait_for_two(cluster)
    hangs = next(iter(cluster.replicas().values()))
    hangs.suspend()
    wait_until(lambda: hangs.pid not in cluster.replicas(), "the one that hangs is gone")
    two_that_answer(cluster, service)


def test_autoscaling_loses_no_request(cluster: RayCluster, service: str) -> None:
    with Load(service, "trickle", clients=1).running() as trickle:
        with Load(service, "heavy", clients=32).running() as heavy:
            wait_until(lambda: len(cluster.replicas()) == 3, "a third replica")
        wait_for_two(cluster)
        trickle.wait_for_more(20)
    assert not trickle.failed
    assert not heavy.failed

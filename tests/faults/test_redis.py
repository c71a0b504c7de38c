"""The Redis of the rate limit dies under load, and comes back: the limit holds all the time."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.support.redis_server import needs_redis, run_redis
from tests.support.server import RunningServer
from tests.support.waiting import running

pytestmark = needs_redis

BODY = {"sentences": ["search"], "return_colbert": False}
BURST = 5
CLIENTS = 4
LIMIT = 60.0


class Load:
    """Clients that send without a pause, and how many answers there were of each status."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._news = threading.Condition()
        self.answers: Counter[int] = Counter()
        self._threads = [threading.Thread(target=self._send) for _ in range(CLIENTS)]

    def _send(self) -> None:
        with self._server.client() as client:
            while not self._stop.is_set():
                status = client.post("/embeddings/", json=BODY).status_code
                with self._news:
                    self.answers[status] += 1
                    self._news.notify()

    def wait_for(self, status: int, count: int) -> None:
        """Wait until there were so many of this status since the load began."""
        with self._news:
            done = lambda: self.answers[status] >= count  # noqa: E731
            assert self._news.wait_for(done, LIMIT), self._server.log

    def is_refused(self) -> None:
        """Wait for fifty refusals from now on."""
        self.wait_for(429, self.answers[429] + 50)

    @contextmanager
    def running(self) -> Iterator["Load"]:
        with running(self._threads, self._stop, LIMIT):
            yield self


def store_errors(client: httpx2.Client) -> float:
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = (sample for family in families for sample in family.samples)
    return next(s.value for s in samples if s.name == "embedder_rate_limit_store_errors_total")


def test_redis_killed_under_load_and_back_again(serve, tmp_path: Path) -> None:
    limits = {"RATE_LIMIT_REQUESTS_PER_MINUTE": "1", "RATE_LIMIT_BURST_SIZE": str(BURST)}
    with (
        run_redis(tmp_path, "very-secret") as redis,
        serve(RATE_LIMIT_STORE=redis.url, **limits) as server,
        server.client() as client,
    ):
        with Load(server).running() as load:
            load.is_refused()
            before = store_errors(client)
            redis.kill()
            # The process has buckets of its own, which were full: they may be empty by now, or
            # since Redis missed its time.
            load.wait_for(200, 2 * BURST)
            load.is_refused()
            assert store_errors(client) > before
            assert client.get("/health").json()["status"] == "healthy"
            redis.start()
            server.wait_for_line("rate_limit_store_back")
            load.is_refused()
            redis.freeze()
            load.is_refused()
            assert client.get("/health").status_code == 200
            redis.thaw()
            load.is_refused()
        assert load.answers.keys() == {200, 429}
        # A burst by Redis, one by the process itself, one by the new Redis, and what a minute adds.
        assert load.answers[200] < 4 * BURST
    # One of each for each time, and not for each request; a few more where a slow machine let Redis
    # miss its time, perhaps at the very end.
    gone = server.log.count("rate_limit_store_gone")
    assert gone - server.log.count("rate_limit_store_back") in {0, 1}
    assert 2 <= gone < 50
    assert "Traceback" not in server.log
    assert "very-secret" not in server.log


def test_the_service_starts_and_answers_while_redis_is_not_there(serve, tmp_path: Path) -> None:
    with run_redis(tmp_path) as redis:
        redis.kill()
        with serve(RATE_LIMIT_STORE=redis.url) as server, server.client() as client:
            statuses = [client.post("/embeddings/", json=BODY).status_code for _ in range(20)]
            assert statuses == [200] * 20
            assert store_errors(client) >= 1
            assert server.log.count("rate_limit_store_gone") == 1

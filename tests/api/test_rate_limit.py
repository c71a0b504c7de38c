"""The rate limit through real server processes: what a client sees, and that all counts agree."""

from collections import Counter
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.redis_server import needs_redis, run_redis
from tests.support.server import run_server

BODY = {"sentences": ["search"], "return_colbert": False}
RERANK = {"query": "search", "passages": ["one"]}
BURST = 10
# So slow that no token is added while a test runs.
LIMITS = {"RATE_LIMIT_REQUESTS_PER_MINUTE": "1", "RATE_LIMIT_BURST_SIZE": str(BURST)}


def counters(client: httpx2.Client) -> Counter[str]:
    """The sum of each request counter, and the reasons of refusals."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            if sample.name.endswith("_requests_total"):
                found["answered"] += int(sample.value)
            if sample.name.endswith("_requests_rejected_total"):
                found[f"{sample.name} {sample.labels['reason']}"] += int(sample.value)
    return +found


def test_a_burst_is_answered_the_rest_is_429_and_every_count_agrees(
    tiny_m3: Path, tmp_path: Path
) -> None:
    settings = {"EMBEDDING_MODEL": str(tiny_m3)} | LIMITS
    with run_server(tmp_path, **settings) as server, server.client() as client:
        server.wait_until_healthy()
        answers = [client.post("/embeddings/", json=BODY) for _ in range(BURST + 5)]
        answers += [client.post("/rerank", json=RERANK) for _ in range(3)]
        statuses = Counter(answer.status_code for answer in answers)
        assert statuses == {200: BURST, 429: 8}
        refused = answers[-1]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        # Dialects share the path, and the body that would tell them apart is not read.
        assert {"detail", "code", "request_id"} <= refused.json().keys()
        assert refused.headers["x-request-id"] == refused.json()["request_id"]
        for path in ("/health", "/health/live", "/stats", "/metrics", "/docs", "/openapi.json"):
            assert [client.get(path).status_code for _ in range(BURST)] == [200] * BURST
        stats = client.get("/stats").json()
        assert counters(client) == {
            "answered": BURST,
            "embedding_requests_rejected_total rate_limit": 5,
            "rerank_requests_rejected_total rate_limit": 3,
        }
        assert (stats["total_requests"], stats["rejected_requests"]) == (BURST, 8)


@needs_redis
def test_two_processes_share_one_budget_in_redis(tiny_m3: Path, tmp_path: Path) -> None:
    with run_redis(tmp_path, "very-secret") as redis:
        settings = {"EMBEDDING_MODEL": str(tiny_m3), "RATE_LIMIT_STORE": redis.url} | LIMITS
        with (
            run_server(tmp_path, LOG_LEVEL="debug", **settings) as one,
            run_server(tmp_path, LOG_LEVEL="debug", **settings) as two,
        ):
            one.wait_until_healthy()
            two.wait_until_healthy()
            with one.client() as first, two.client() as second:
                answers = [
                    client.post("/embeddings/", json=BODY)
                    for _ in range(BURST)
                    for client in (first, second)
                ]
        assert Counter(answer.status_code for answer in answers) == {200: BURST, 429: BURST}
        assert [answer.status_code for answer in answers[:BURST]] == [200] * BURST
        assert "very-secret" not in one.log + two.log


@pytest.mark.parametrize(
    "address", ["redis://:very-secret@localhost:port", "mongodb://very-secret"]
)
def test_a_wrong_store_stops_the_start_without_showing_it(tmp_path: Path, address: str) -> None:
    with pytest.raises(AssertionError) as caught, run_server(tmp_path, RATE_LIMIT_STORE=address):
        pass
    assert "RATE_LIMIT_STORE=********** is not allowed: memory, or" in str(caught.value)
    assert "very-secret" not in str(caught.value)

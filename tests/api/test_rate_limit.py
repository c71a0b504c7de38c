"""The rate limit before the whole service: what a client sees, and that all counts agree."""

from collections import Counter
from pathlib import Path

from tests.engine.fakes import FakeModel, FakeReranker, loaded
from tests.support.in_process import served
from tests.support.redis_server import needs_redis, run_redis
from tests.support.server import run_server

BODY = {"sentences": ["search"], "return_sparse": False, "return_colbert": False}
RERANK = {"query": "search", "passages": ["one"]}
BURST = 10
# So slow that no token is added while a test runs.
LIMITS = {"RATE_LIMIT_REQUESTS_PER_MINUTE": "1", "RATE_LIMIT_BURST_SIZE": str(BURST)}


async def test_a_burst_is_answered_the_rest_is_429_and_every_count_agrees() -> None:
    limits = {"rate_limit_requests_per_minute": 1, "rate_limit_burst_size": BURST}
    models = loaded(FakeModel(), 100, FakeReranker())
    async with served(models, **limits) as (service, client):
        answers = [await client.post("/embeddings/", json=BODY) for _ in range(BURST + 5)]
        answers += [await client.post("/rerank", json=RERANK) for _ in range(3)]
        assert Counter(answer.status_code for answer in answers) == {200: BURST, 429: 8}
        refused = answers[-1]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        # Dialects share the path, and the body that would tell them apart is not read.
        assert {"detail", "code", "request_id"} <= refused.json().keys()
        assert refused.headers["x-request-id"] == refused.json()["request_id"]
        for path in ("/health", "/health/live", "/stats", "/metrics", "/docs", "/openapi.json"):
            assert [(await client.get(path)).status_code for _ in range(BURST)] == [200] * BURST
        stats = (await client.get("/stats")).json()
        assert (stats["total_requests"], stats["rejected_requests"]) == (BURST, 8)
        for kind, count in (("embedding", 5), ("rerank", 3)):
            series = f"{kind}_requests_rejected_total"
            assert service.metrics.value(series, reason="rate_limit") == count


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

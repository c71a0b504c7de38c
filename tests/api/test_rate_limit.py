"""The rate limit before the whole service: what a client sees, and that all counts agree."""

from collections import Counter

from tests.engine.fakes import FakeModel, FakeReranker, loaded
from tests.support.in_process import served

BODY = {"sentences": ["search"], "return_sparse": False, "return_colbert": False}
RERANK = {"query": "search", "passages": ["one"]}
BURST = 10


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

"""Two services share vectors through a Redis that dies, and comes back: every answer is right."""

from pathlib import Path

from tests.support.redis_server import needs_redis, run_redis
from tests.support.server import RunningServer, run_server

pytestmark = needs_redis

FROM_REDIS = 'embedder_cache_hits_total{source="redis"}'


def embed(server: RunningServer, *texts: str) -> list[dict]:
    with server.client() as client:
        answer = client.post("/embeddings/", json={"sentences": texts})
    assert answer.status_code == 200, answer.text
    return [item["embeddings"] for item in answer.json()["data"]]


def share_a_text(one: RunningServer, two: RunningServer, prefix: str) -> None:
    """New texts are computed by one until the other finds one that it has not computed."""
    before, count = two.metric(FROM_REDIS), iter(range(10_000))

    def found() -> float:
        text = f"{prefix} {next(count)}"
        assert embed(one, text) == embed(two, text)
        return two.metric(FROM_REDIS)

    two.wait_for_more(found, than=before)


def test_redis_killed_and_back_again(tiny_m3: Path, tmp_path: Path) -> None:
    with run_redis(tmp_path, "very-secret") as redis:
        settings = {"EMBEDDING_MODEL": str(tiny_m3), "EMBEDDING_CACHE": redis.url}
        with run_server(tmp_path, **settings) as one, run_server(tmp_path, **settings) as two:
            for server in (one, two):
                server.wait_until_healthy()
            share_a_text(one, two, "before")
            redis.kill()
            for i in range(20):
                assert len(embed(one, f"gone {i}", "gone")) == len(embed(two, f"gone {i}")) + 1
            for server in (one, two):
                server.wait_for_line("embedding_cache_store_gone")
                assert server.metric("embedder_cache_store_errors_total") >= 1
            redis.start()
            share_a_text(one, two, "after")
            two.wait_for_line("embedding_cache_store_back")
            for server in (one, two):
                assert "Traceback" not in server.log
                assert "very-secret" not in server.log

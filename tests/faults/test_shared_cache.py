"""Two services share vectors through a Redis that dies, and comes back: every answer is right.

So it is where somebody else has written to that Redis, and where it is none.
"""

from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.numpy import load, save

from tests.support.redis_server import needs_redis, run_odd_redis, run_redis
from tests.support.server import RunningServer

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


def test_redis_killed_and_back_again(serve, tmp_path: Path) -> None:
    with run_redis(tmp_path, "very-secret") as redis:
        cache = {"EMBEDDING_CACHE": redis.url}
        with serve(**cache) as one, serve(**cache) as two:
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


def forge(value: bytes, kind: str) -> bytes:
    """An entry of the right types, and of nothing that a model has made."""
    entry = load(value)
    ids = entry["ids"]
    rows = {"dense": (), "colbert": (len(ids) + 47,)}
    if kind == "sparse":
        entry |= {"indices": np.array([-7, 2**40]), "values": np.ones(2, np.float32)}
    else:
        entry[kind] = np.full((*rows[kind], entry[kind].shape[-1]), np.nan, np.float32)
    return save(entry)


def test_what_somebody_else_wrote_to_redis_is_not_answered(serve, tmp_path: Path) -> None:
    with run_redis(tmp_path) as store, redis.Redis(port=store.port) as writer:
        cache = {"EMBEDDING_CACHE": store.url}
        with serve(**cache) as one, serve(**cache) as two:
            right = embed(one, "a new text")
            one.wait_for_more(writer.dbsize, than=2)  # One entry of each kind.
            for key in writer.keys("*"):
                writer.set(key, forge(writer.get(key), key.decode().rpartition(":")[2]))
            assert embed(two, "a new text") == right
            two.wait_for_line("embedding_cache_entry_refused")
            assert two.log.count("embedding_cache_entry_refused") == 1
            assert "Traceback" not in two.log


@pytest.mark.parametrize("answer", [b":7\r\n", b"*1\r\n:7\r\n"], ids=["number", "list"])
def test_a_redis_that_is_none_fails_no_request(serve, answer: bytes) -> None:
    with (
        run_odd_redis(answer) as odd,
        serve(EMBEDDING_CACHE=odd.url, RATE_LIMIT_STORE=odd.url) as server,
    ):
        assert embed(server, "a", "b") == embed(server, "a", "b")
        assert "Traceback" not in server.log

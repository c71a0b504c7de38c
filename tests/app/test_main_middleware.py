"""The middleware together: tokens, origins, the rate limit, a prefix, and the log."""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from structlog.testing import capture_logs

from app.main import create_app
from app.settings import Settings
from tests.smart_embedder.fakes import FakeModel, FakeReranker, loaded
from tests.support.in_process import served

BODY = {"sentences": ["search"], "return_sparse": False, "return_colbert": False}
PUBLIC = ["/health", "/health/live", "/health/ready", "/docs", "/redoc", "/openapi.json"]
OPERATION = ["/stats", "/metrics"]
ALLOWED = {"Origin": "https://app.example.com"}
OWN, NAMED, WRONG = (
    {"Authorization": f"Bearer {token}"} for token in ("own-secret", "named-secret", "no-secret")
)


async def test_token_and_cors_decide_on_access_and_on_cors_headers(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokens").write_text("alice:named-secret\n")
    settings = {"api_token": "own-secret", "api_tokens_file": tmp_path / "tokens"}
    settings |= {"protect_metrics": True, "cors_origins": ALLOWED["Origin"]}
    async with served(loaded(FakeModel()), **settings) as (service, client):
        assert {(await client.get(path)).status_code for path in PUBLIC} == {200}
        for headers in (OWN, NAMED):
            assert (await client.post("/embeddings/", json=BODY, headers=headers)).is_success
            assert {(await client.get(p, headers=headers)).status_code for p in OPERATION} == {200}
        for headers in ({}, WRONG):
            answers = [
                await client.post(path, json=BODY, headers=headers)
                for path in ("/embeddings/", "/rerank", "/nowhere")
            ]
            answers += [await client.get(path, headers=headers) for path in OPERATION]
            assert {answer.json()["code"] for answer in answers} == {"unauthorized"}
            assert not any("secret" in answer.text for answer in answers)
        metrics = service.metrics.render().decode()
        assert 'embedding_requests_rejected_total{reason="auth"} 2.0' in metrics
        assert "secret" not in metrics
        for answer in (
            await client.post("/embeddings/", json=BODY, headers=OWN | ALLOWED),
            await client.post("/embeddings/", json=BODY, headers=ALLOWED),
            await client.post("/embeddings/", json={}, headers=OWN | ALLOWED),
            await client.get("/nowhere", headers=OWN | ALLOWED),
        ):
            assert answer.headers["access-control-allow-origin"] == ALLOWED["Origin"]
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        foreign = await client.post("/embeddings/", json=BODY, headers={"Origin": "https://b.com"})
        assert (foreign.status_code, foreign.json()["code"]) == (403, "foreign_origin")
        assert "CORS_ORIGINS" in foreign.json()["detail"]
        stats = (await client.get("/stats", headers=OWN)).json()
        assert stats["rejected_requests"] == 6
        first = ALLOWED | {"Access-Control-Request-Method": "POST"}
        assert (await client.options("/embeddings/", headers=first)).status_code == 200


PROXY = "10.0.0.1"


@cache
def service() -> Any:
    """A service that trusts `PROXY`; these requests need no models."""
    return create_app(Settings(trusted_proxies=PROXY, api_token="secret", protect_metrics=True))


def ask(path: str, *, root_path: str = "", peer: str = PROXY, **headers: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(service(), root_path=root_path, client=(peer, 1))
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def get() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.get(path, headers=named)

    return asyncio.run(get())


def test_a_forwarded_prefix_may_look_like_a_path_of_the_service() -> None:
    """Access depends on the path below the prefix."""
    assert ask("/health/stats", root_path="/health").status_code == 401
    assert ask("/stats", x_forwarded_prefix="/health").status_code == 401
    assert ask("/stats/health", root_path="/stats").json()["status"] == "loading"


SECRET = "zebra"
EMBED = {"sentences": [f"{SECRET} one", f"{SECRET} two"], "return_colbert": False}
RERANK = {"query": SECRET, "passages": [SECRET] * 3}
MOST_BYTES = 10_000
WORK = {"tokens", "tokenize_ms", "queue_ms", "inference_ms"}
HUSH = {"Authorization": "Bearer hush-hush"}


async def test_the_log_line_has_all_numbers_and_no_text(tmp_path: Path) -> None:
    (tokens := tmp_path / "tokens").write_text("alice:hush-named\n")
    settings = {"api_token": "hush-hush", "api_tokens_file": tokens, "max_body_bytes": MOST_BYTES}
    models = loaded(FakeModel(), 100, FakeReranker())
    async with served(models, **settings) as (_, client):
        with capture_logs() as lines:
            for path, body, headers in (
                ("/embeddings/?q=zebra", EMBED, HUSH | {"X-Request-ID": "first"}),
                ("/rerank", RERANK, {"Authorization": "Bearer hush-named"}),
                ("/embeddings/", {"sentences": [SECRET, 1], SECRET: 1}, HUSH),
                ("/rerank", RERANK, {"Authorization": "Bearer zebra-token"}),
                ("/nowhere%0A%1B%5B2J/" + "x" * 300, RERANK, HUSH),
                ("/rerank", {SECRET: "x" * MOST_BYTES}, HUSH),
            ):
                await client.post(path, json=body, headers=headers)
            await client.get("/rerank?q=zebra", headers=HUSH)
    assert not any(SECRET in str(line) or "hush" in str(line) for line in lines)
    requests = [line for line in lines if line["event"] == "request"]
    embed, rerank, invalid, refused, unknown, too_large, wrong_method = requests
    assert embed.keys() >= WORK | {"sentences"}
    values = [embed[name] for name in ("request_id", "route", "client", "status", "sentences")]
    assert values == ["first", "/embeddings/", "default", 200, 2]
    assert embed["bytes_in"] > 50
    assert embed["bytes_out"] > 100
    assert embed["ms"] >= embed["inference_ms"] > 0
    assert (rerank["client"], rerank["passages"]) == ("alice", 3)
    assert (invalid["status"], invalid["code"]) == (422, "invalid_request")
    assert (refused["status"], refused["bytes_in"]) == (401, 0)
    assert "client" not in refused
    # Clients that guess tokens, too.
    assert {event["client_address"] for event in requests} == {"127.0.0.1"}
    assert unknown["status"] == 404
    assert "route" not in unknown
    assert unknown["path"] == r"/nowhere\n\x1b[2J/" + "x" * 186
    assert (wrong_method["method"], wrong_method["status"]) == ("GET", 405)
    assert wrong_method["code"] == "method_not_allowed"
    assert too_large["status"] == 413
    assert "route" not in too_large
    assert [event["path"] for event in requests[:4]] == ["/embeddings/", "/rerank"] * 2


async def test_named_tokens_are_limited_by_tokens_and_counted(tmp_path: Path) -> None:
    lines = "alice:a\ntokens_per_minute=40 weight=3\nbob:b\n"
    (tmp_path / "tokens").write_text(lines)
    alice, bob = ({"Authorization": f"Bearer {token}"} for token in "ab")
    models = loaded(FakeModel(), reranker=FakeReranker())
    async with served(models, api_tokens_file=tmp_path / "tokens") as (service, client):
        before = service.metrics.render().decode()
        assert 'embedder_client_requests_total{client="alice"} 0.0' in before
        body = BODY | {"sentences": ["x" * 30]}
        rerank = {"query": "a", "passages": ["b" * 30]}
        with capture_logs() as log:
            answers = [
                await client.post("/embeddings/", json=body, headers=alice),
                await client.post("/rerank", json=rerank, headers=alice),
                await client.post("/embeddings/", json=body, headers=alice),
                await client.post("/embeddings/", json=body, headers=bob),
            ]
        assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
        used = sum(answer.json()["usage"]["total_tokens"] for answer in answers[:2])
        assert used > 40
        assert answers[2].headers["ratelimit"].startswith('"tokens";r=0;t=')
        assert "ratelimit" not in answers[3].headers
        lines = [entry for entry in log if entry["event"] == "request"]
        assert [line["client"] for line in lines] == ["alice", "alice", "alice", "bob"]
        metrics = service.metrics
        for name, requests, rejected, tokens in (("alice", 3, 1, used), ("bob", 1, 0, None)):
            assert metrics.value("embedder_client_requests_total", client=name) == requests
            assert metrics.value("embedder_client_requests_rejected_total", client=name) == rejected
            if tokens is not None:
                assert metrics.value("embedder_client_tokens_total", client=name) == tokens

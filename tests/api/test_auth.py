"""Tokens and origins before the whole service: what is public, and who may read a refusal."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from httpx2 import AsyncClient

from tests.engine.fakes import FakeModel, loaded
from tests.support.in_process import served

BODY = {"sentences": ["search"], "return_sparse": False, "return_colbert": False}
PUBLIC = ["/health", "/health/live", "/health/ready", "/docs", "/redoc", "/openapi.json"]
OPERATION = ["/stats", "/metrics"]
ALLOWED = {"Origin": "https://app.example.com"}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[AsyncClient]:
    """A client of a service with tokens and an allowed origin."""
    (folder / "tokens").write_text("alice:named-secret\n")
    settings = {"api_token": "own-secret", "api_tokens_file": folder / "tokens"}
    settings |= {"protect_metrics": True, "cors_origins": ALLOWED["Origin"]}
    async with served(loaded(FakeModel()), **settings) as (service, client):
        yield client
        assert "secret" not in service.metrics.render().decode()


async def test_a_known_token_opens_what_is_not_public(tmp_path: Path) -> None:
    async with guarded(tmp_path) as client:
        assert {(await client.get(path)).status_code for path in PUBLIC} == {200}
        for token in ("own-secret", "named-secret"):
            headers = bearer(token)
            assert (await client.post("/embeddings/", json=BODY, headers=headers)).is_success
            assert {(await client.get(p, headers=headers)).status_code for p in OPERATION} == {200}
        for headers in ({}, bearer("wrong-secret"), {"Authorization": "Basic b3duOnNlY3JldA=="}):
            answers = [
                await client.post(path, json=BODY, headers=headers)
                for path in ("/embeddings/", "/rerank", "/nowhere")
            ]
            answers += [await client.get(path, headers=headers) for path in OPERATION]
            assert {each.json()["code"] for each in answers} == {"unauthorized"}
            assert not any("secret" in each.text for each in answers)
        metrics = (await client.get("/metrics", headers=bearer("own-secret"))).text
        assert 'embedding_requests_rejected_total{reason="auth"} 3.0' in metrics


async def test_a_page_of_an_allowed_origin_may_ask_and_read_every_answer(tmp_path: Path) -> None:
    headers = bearer("own-secret") | ALLOWED
    async with guarded(tmp_path) as client:
        for answer in (
            await client.post("/embeddings/", json=BODY, headers=headers),
            await client.post("/embeddings/", json=BODY, headers=ALLOWED),
            await client.post("/embeddings/", json={}, headers=headers),
            await client.get("/nowhere", headers=headers),
        ):
            assert answer.headers["access-control-allow-origin"] == ALLOWED["Origin"]
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        first = ALLOWED | {"Access-Control-Request-Method": "POST"}
        assert (await client.options("/embeddings/", headers=first)).status_code == 200

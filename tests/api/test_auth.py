"""Tokens and origins before the whole service: what is public, and who may read a refusal."""

from pathlib import Path

from tests.engine.fakes import FakeModel, loaded
from tests.support.in_process import served

BODY = {"sentences": ["search"], "return_sparse": False, "return_colbert": False}
PUBLIC = ["/health", "/health/live", "/health/ready", "/docs", "/redoc", "/openapi.json"]
OPERATION = ["/stats", "/metrics"]
ALLOWED = {"Origin": "https://app.example.com"}
OWN, NAMED, WRONG = (
    {"Authorization": f"Bearer {token}"} for token in ("own-secret", "named-secret", "no-secret")
)


async def test_a_known_token_opens_what_is_not_public_and_an_allowed_page_reads_every_answer(
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
        for headers in ({}, WRONG, {"Authorization": "Basic b3duOnNlY3JldA=="}):
            answers = [
                await client.post(path, json=BODY, headers=headers)
                for path in ("/embeddings/", "/rerank", "/nowhere")
            ]
            answers += [await client.get(path, headers=headers) for path in OPERATION]
            assert {each.json()["code"] for each in answers} == {"unauthorized"}
            assert not any("secret" in each.text for each in answers)
        metrics = service.metrics.render().decode()
        assert 'embedding_requests_rejected_total{reason="auth"} 3.0' in metrics
        assert "secret" not in metrics
        for answer in (
            await client.post("/embeddings/", json=BODY, headers=OWN | ALLOWED),
            await client.post("/embeddings/", json=BODY, headers=ALLOWED),
            await client.post("/embeddings/", json={}, headers=OWN | ALLOWED),
            await client.get("/nowhere", headers=OWN | ALLOWED),
        ):
            assert answer.headers["access-control-allow-origin"] == ALLOWED["Origin"]
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        first = ALLOWED | {"Access-Control-Request-Method": "POST"}
        assert (await client.options("/embeddings/", headers=first)).status_code == 200

"""Tokens through a real server process: what is public, what is not, and what never leaks."""

from pathlib import Path

import pytest

from tests.support.server import run_server

BODY = {"sentences": ["search"], "return_colbert": False}
PUBLIC = ["/health", "/health/live", "/health/ready", "/docs", "/redoc", "/openapi.json"]
OPERATION = ["/stats", "/metrics"]


@pytest.fixture(scope="module")
def server(tiny_m3: Path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("auth")
    (folder / "tokens").write_text("alice:named-secret\n")
    settings = {
        "EMBEDDING_MODEL": str(tiny_m3),
        "API_TOKEN": "own-secret",
        "API_TOKENS_FILE": str(folder / "tokens"),
        "PROTECT_METRICS": "true",
        "CORS_ORIGINS": "https://app.example.com",
        "LOG_LEVEL": "debug",
    }
    with run_server(folder, **settings) as running:
        running.wait_until_healthy()
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("path", PUBLIC)
def test_public_paths_ask_for_no_token(client, path: str) -> None:
    assert client.get(path).status_code == 200


@pytest.mark.parametrize("token", ["own-secret", "named-secret"])
def test_a_known_token_opens_every_endpoint(client, token: str) -> None:
    assert client.post("/embeddings/", json=BODY, headers=bearer(token)).status_code == 200
    for path in OPERATION:
        assert client.get(path, headers=bearer(token)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong-secret"),
        {"Authorization": "Bearer"},
        {"Authorization": "Basic b3duOnNlY3JldA=="},
    ],
)
def test_without_a_known_token_it_is_401(client, headers) -> None:
    for path in ("/embeddings/", "/rerank", "/nowhere"):
        response = client.post(path, json=BODY, headers=headers)
        assert (response.status_code, response.json()["code"]) == (401, "unauthorized")
        assert response.headers["www-authenticate"] == "Bearer"
        assert "secret" not in response.text
    for path in OPERATION:
        assert client.get(path, headers=headers).status_code == 401


def test_a_refusal_is_counted_and_no_token_reaches_log_or_metrics(server, client) -> None:
    client.post("/embeddings/", json=BODY, headers=bearer("wrong-secret"))
    metrics = client.get("/metrics", headers=bearer("own-secret")).text
    (line,) = [
        line
        for line in metrics.splitlines()
        if line.startswith('embedding_requests_rejected_total{reason="auth"}')
    ]
    assert float(line.split()[1]) >= 1
    assert "secret" not in metrics
    assert "secret" not in server.log


ALLOWED = {"Origin": "https://app.example.com"}


def test_a_page_of_an_allowed_origin_may_ask_and_read_every_answer(client) -> None:
    headers = bearer("own-secret") | ALLOWED
    for answer in (
        client.post("/embeddings/", json=BODY, headers=headers),
        client.post("/embeddings/", json=BODY, headers=ALLOWED),
        client.post("/embeddings/", json={}, headers=headers),
        client.get("/nowhere", headers=headers),
    ):
        assert answer.headers["access-control-allow-origin"] == ALLOWED["Origin"]
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    first = ALLOWED | {"Access-Control-Request-Method": "POST"}
    assert client.options("/embeddings/", headers=first).status_code == 200

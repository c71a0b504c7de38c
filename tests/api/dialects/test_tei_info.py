"""What text-embeddings-inference's paths tell before there are models; also to HEAD."""

from typing import Any

import pytest
from httpx2 import ASGITransport, AsyncClient

from app.main import create_app
from app.settings import Settings


@pytest.fixture
def client() -> AsyncClient:
    """Of a service whose models are not loaded yet."""
    app: Any = create_app(Settings(api_token=None, embedding_model="own/bge"))
    return AsyncClient(transport=ASGITransport(app), base_url="http://service")


@pytest.mark.parametrize("path", ["/ping", "/models/own/bge/ping", "/models/own/bge/health"])
async def test_while_models_are_loaded_a_model_does_not_answer(client, path) -> None:
    for method in ("GET", "HEAD"):
        answer = await client.request(method, path)
        assert answer.status_code == 503
        if method == "GET":
            assert answer.json() == {
                "error": "loading: the models are being loaded",
                "error_type": "Unhealthy",
            }


@pytest.mark.parametrize("path", ["/info", "/models/own/bge/info"])
async def test_what_a_model_is_like_is_told_when_it_is_loaded(client, path) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["error_type"] == "Unhealthy"


@pytest.mark.parametrize("path", ["/models/other/ping", "/models/other/info"])
async def test_a_model_that_is_nobodys_is_told_so(client, path) -> None:
    assert (await client.get(path)).status_code == 404

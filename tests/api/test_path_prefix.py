"""The service below a path of a proxy, or of an ASGI server: what is answered, where links lead."""

import asyncio
from functools import cache, partial
from typing import Any

import httpx2
import pytest

from smart_embedder.main import create_app
from smart_embedder.settings import Settings

PROXY = "10.0.0.1"
PREFIX = "/team/embedder"


@cache
def service() -> Any:
    """A service that trusts `PROXY`; it answers these requests without models."""
    return create_app(Settings(trusted_proxies=PROXY, api_token="secret", protect_metrics=True))


def ask(path: str, *, root_path: str = "", peer: str = PROXY, **headers: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(service(), root_path=root_path, client=(peer, 1))
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def get() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.get(path, headers=named)

    return asyncio.run(get())


# A proxy removes the prefix and says so; a server keeps it in the path.
behind_proxy = partial(ask, x_forwarded_prefix=PREFIX)


def behind_server(path: str, **options: str) -> httpx2.Response:
    return ask(PREFIX + path, root_path=PREFIX, **options)


@pytest.mark.parametrize("ask_below", [behind_proxy, behind_server])
def test_links_have_the_prefix_and_paths_mean_what_they_do_without(ask_below) -> None:
    assert ask_below("/", accept="text/html").headers["location"] == f"{PREFIX}/ui"
    assert ask_below("/").json()["paths"]["health"] == f"{PREFIX}/health"
    assert ask_below("/openapi.json").json()["servers"] == [{"url": PREFIX}]
    assert ask_below("/health").json()["status"] == "loading"
    assert ask_below("/static/docs/swagger-ui.css").status_code == 200
    # What needs a token, and how errors look, is told by the path below the prefix.
    statuses = [ask_below(path).status_code for path in ("/ui/", "/stats", "/v1/models")]
    assert statuses == [200, 401, 401]
    assert "error" in ask_below("/v1/models").json()
    missing = ask_below("/nowhere", authorization="Bearer secret").json()
    assert missing["detail"].startswith("There is no /nowhere here")


@pytest.mark.parametrize(
    "given",
    [
        {"peer": "10.0.0.2", "x_forwarded_prefix": PREFIX},
        {"x_forwarded_prefix": "//elsewhere.example.com"},
        {"x_forwarded_prefix": "https://elsewhere.example.com"},
        {"x_forwarded_prefix": "/a, /b"},
        {"x_forwarded_prefix": "/"},
    ],
)
def test_a_prefix_counts_only_as_a_path_and_from_a_trusted_proxy(given) -> None:
    assert ask("/", accept="text/html", **given).headers["location"] == "ui"
    assert "servers" not in ask("/openapi.json", **given).json()


def test_a_prefix_may_look_like_a_path_of_the_service() -> None:
    """A token is asked for by the path below, whatever the prefix is called."""
    assert ask("/health/stats", root_path="/health").status_code == 401
    assert ask("/stats", x_forwarded_prefix="/health").status_code == 401
    assert ask("/stats/health", root_path="/stats").json()["status"] == "loading"

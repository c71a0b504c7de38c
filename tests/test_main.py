"""The app as a whole: what its creation does once, and in which order its start does the rest."""

import asyncio

import fastapi.routing
import httpx2
import pytest

from app.main import create_app
from app.settings import Settings
from tests.engine.fakes import FakeModel, loaded


async def test_no_request_waits_for_routes_or_descriptions_to_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FastAPI makes them on the event loop, for all routes before the one asked for."""
    app = create_app(Settings())

    def make(*_: object, **__: object) -> None:
        raise AssertionError("a request makes what should be there")

    monkeypatch.setattr(fastapi.routing._EffectiveRouteContext, "from_api_route", make)
    monkeypatch.setattr(app, "openapi", make)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://service") as client:
        assert (await client.get("/health")).status_code == 503
        assert "there are POST /embeddings/" in (await client.get("/nothing")).text
        assert (await client.get("/rerank")).headers["Allow"] == "POST"


async def test_what_only_documentation_needs_is_made_when_the_service_is_ready() -> None:
    done, settled = [], asyncio.Event()

    def settle() -> None:
        done.append(("settled", app.openapi_schema is not None))
        settled.set()

    app = create_app(
        Settings(),
        loader=lambda _: loaded(FakeModel()),
        on_ready=lambda _: done.append(("ready", app.openapi_schema is not None)),
        on_settled=settle,
    )
    async with app.router.lifespan_context(app):
        await settled.wait()
    assert done == [("ready", False), ("settled", True)]

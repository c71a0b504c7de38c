"""The creation of the app, and the order of its start."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import fastapi.routing
import httpx2
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from app import main
from app.main import create_app
from app.middleware.limits import BODY_SECONDS
from app.settings import Settings
from smart_embedder.errors import StartupError
from smart_embedder.interface import DefaultModels
from tests.smart_embedder.fakes import FakeModel, loaded, loading, settings_of

MODELS = loaded(FakeModel())


def client_of(app: FastAPI) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://service")


async def test_no_request_builds_routes_or_the_description(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FastAPI would build them on the event loop, for all routes before the matching one."""
    app = create_app(Settings())

    def make(*_: object, **__: object) -> None:
        raise AssertionError("a request builds what should exist")

    monkeypatch.setattr(fastapi.routing._EffectiveRouteContext, "from_api_route", make)
    monkeypatch.setattr(app, "openapi", make)
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 503
        assert "POST /embeddings/" in (await client.get("/embedding")).text
        assert (await client.get("/rerank")).headers["Allow"] == "POST"


async def test_the_openapi_description_is_created_when_the_service_is_ready() -> None:
    done, settled = [], asyncio.Event()

    def settle() -> None:
        done.append(("settled", app.openapi_schema is not None))
        settled.set()

    app = create_app(
        settings_of(MODELS),
        loader=loading(MODELS),
        on_ready=lambda _: done.append(("ready", app.openapi_schema is not None)),
        on_settled=settle,
    )
    async with app.router.lifespan_context(app):
        await settled.wait()
    assert done == [("ready", False), ("settled", True)]


async def test_memory_short_is_logged_and_a_body_that_never_fits_is_413() -> None:
    device = replace(MODELS.device, host_memory_left=lambda: 1_000_000)
    models, ready = replace(MODELS, devices=(device,)), asyncio.Event()
    chosen = settings_of(models, api_token=None)
    app = create_app(chosen, loader=loading(models), on_ready=lambda _: ready.set())
    with capture_logs() as log:
        async with app.router.lifespan_context(app), client_of(app) as client:
            await ready.wait()
            large = await client.post("/embeddings/", json={"sentences": ["a" * 900_000]})
    assert large.status_code == 413
    assert "memory_short" in [entry["event"] for entry in log]


def middleware_of(**settings: Any) -> dict[str, dict[str, Any]]:
    app = create_app(Settings(rerank_gpu_timeout=1, **settings))
    return {middleware.cls.__name__: middleware.kwargs for middleware in app.user_middleware}


def test_the_memory_budget_follows_the_settings() -> None:
    limit = middleware_of(max_body_bytes=1 << 25, request_timeout=30)
    memory = limit["LimitMemory"]
    assert memory["budget"].max_bytes == 32 << 25
    assert memory["body_seconds"] == min(BODY_SECONDS, 10)
    assert limit["LimitBody"]["max_bytes"] == 1 << 25
    assert middleware_of(request_timeout=600)["LimitMemory"]["body_seconds"] == BODY_SECONDS


@pytest.mark.parametrize("ui", [True, False])
async def test_disabled_parts_are_not_installed(ui: bool) -> None:
    app = create_app(Settings(ui=ui))
    async with client_of(app) as client:
        assert (await client.get("/ui")).status_code == (200 if ui else 404)
    assert "TraceRequests" not in middleware_of()


@asynccontextmanager
async def running() -> AsyncIterator[FastAPI]:
    """An app whose models are loaded."""
    ready, load = asyncio.Event(), loading(MODELS)
    app = create_app(settings_of(MODELS), loader=load, on_ready=lambda _: ready.set())
    async with app.router.lifespan_context(app):
        await ready.wait()
        yield app


async def test_the_lifespan_closes_what_it_has_opened() -> None:
    async with running() as app:
        service = app.state.service
        assert not service.engine.closing
        service.render_threads.submit(int).result()
    assert service.engine.closing
    with pytest.raises(RuntimeError, match="after shutdown"):
        service.render_threads.submit(int)


async def test_the_lateness_of_the_event_loop_is_observed() -> None:
    counted = "embedder_event_loop_lateness_seconds_sum"
    async with running() as app, client_of(app) as client:
        assert (await client.get("/health")).status_code == 200
        metrics = app.state.service.metrics
        before = metrics.value(counted)
        until = time.monotonic() + 0.15
        while time.monotonic() < until:
            pass
        while metrics.value(counted) - before < 0.08:  # noqa: ASYNC110 - turns, not time
            await asyncio.sleep(0)


async def test_a_shutdown_before_the_models_are_loaded_cancels_the_start() -> None:
    reported: list[object] = []
    begun, go_on = threading.Event(), threading.Event()

    def load(settings: Settings) -> DefaultModels:
        begun.set()
        go_on.wait()
        return loading(MODELS)(settings)

    calls = {"on_ready": reported.append, "on_failure": reported.append}
    app = create_app(settings_of(MODELS), loader=load, **calls)
    async with app.router.lifespan_context(app):
        await asyncio.to_thread(begun.wait)
        go_on.set()
    assert app.state.service.engine.closing
    assert reported == []


async def test_a_failed_start_is_reported_once_and_the_app_still_answers() -> None:
    errors: list[Exception] = []
    failed = asyncio.Event()

    def fail(_: Settings) -> DefaultModels:
        raise StartupError("there is no such folder")

    def report(error: Exception) -> None:
        errors.append(error)
        failed.set()

    app = create_app(Settings(), loader=fail, on_failure=report)
    async with app.router.lifespan_context(app):
        await failed.wait()
        async with client_of(app) as client:
            assert (await client.get("/health")).json()["status"] == "unhealthy"
    assert [str(error) for error in errors] == ["there is no such folder"]


def test_the_module_creates_app_on_first_access() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = main.nothing

"""Engines with fake or small models, and functions that wait for their state."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.http_metrics import Metrics
from smart_embedder.core import EngineCore
from smart_embedder.requests import EmbedRequest
from smart_embedder.settings import EngineSettings
from smart_embedder.startup import load_models
from tests.smart_embedder.fakes import (
    FakeModel,
    FakeReranker,
    HeldDevice,
    loaded,
    loading,
    settings_of,
)


def engine_for(
    model: FakeModel | None = None,
    metrics: Metrics | None = None,
    *,
    dense: FakeModel | None = None,
    reranker: FakeReranker | None = None,
    late_interaction: bool = False,
    max_batch_tokens: int = 10,
    seconds_per_token: float = 0.0,
    shutdown_timeout: float = 30,
    **settings: Any,
) -> EngineCore:
    models = replace(
        loaded(model or FakeModel(), max_batch_tokens, reranker),
        dense=dense,
        late_interaction=late_interaction,
    )
    return EngineCore(
        settings_of(models, **settings),
        loading(models, seconds_per_token),
        metrics,
        shutdown_timeout=shutdown_timeout,
    )


def engine_on_cpu(folder: Path, **settings: Any) -> EngineCore:
    """An engine with the real model in a folder, in float32, by default without a reranker."""
    defaults: dict[str, Any] = {"reranker_model": "none", "device": "cpu", "dtype": "float32"}
    values = defaults | settings
    return EngineCore(EngineSettings(embedding_model=str(folder), **values), load_models)


async def entered(model: HeldDevice) -> None:
    """Wait until the device thread is inside a forward."""
    await asyncio.to_thread(model.entered.acquire)


async def hold(engine: EngineCore, model: FakeModel) -> "asyncio.Task":
    """Occupy the device with one text, until `model.gate` is released."""
    model.held = True
    task = asyncio.create_task(engine.embed(EmbedRequest(["held"])))
    await entered(model)
    return task


def let_go(*models: HeldDevice) -> None:
    for model in models:
        model.held = False
        model.gate.release()


@asynccontextmanager
async def busy(engine: EngineCore, model: FakeModel) -> AsyncIterator[None]:
    """Occupy the device in the block, so that requests wait."""
    held = await hold(engine, model)
    try:
        yield
    finally:
        let_go(model)
        await held


async def waiting(engine: EngineCore, count: int) -> None:
    """Let the loop run until `count` requests wait."""
    while engine.waiting != count:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)


async def queued(engine: EngineCore, tokens: int) -> None:
    """Let the loop run until so many tokens wait in the queue."""
    while engine._queue.waiting_tokens != tokens:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)

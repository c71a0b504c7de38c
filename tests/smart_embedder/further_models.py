"""A fake loader of single models: tests hold and fail loads, and set the memory."""

import asyncio
import gc
import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

from app.http_metrics import Metrics
from smart_embedder.core import EngineCore
from smart_embedder.interface import LoadPlan, MemoryUsage, ModelState, ModelStatus, PlacedModels
from smart_embedder.requests import EmbedRequest
from smart_embedder.settings import ModelEntry
from tests.smart_embedder.fakes import FakeModel, FakeReranker, loaded, loading, placed, settings_of

GIGABYTE = 10**9


class FakeLoader:
    """A loader whose models use a gigabyte, or `gigabytes`, as long as they are referenced.

    Their numbers are larger by one than those of the default models.
    `garbage` is memory that is cached until `free_memory`.
    """

    def __init__(self, gigabytes: float = 100) -> None:
        self.total = int(gigabytes * GIGABYTE)
        self.used_by_others = 0
        self.garbage = 0
        self.loads: list[str] = []
        self.gigabytes: dict[str, int] = {}
        self.versions: dict[str, str] = {}
        self.failures: list[Exception] = []
        self.devices: dict[str, str] = {}
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.held = False
        self.alive: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def prepare_thread(self) -> None:
        pass

    def read_memory(self, name: str) -> MemoryUsage:
        models = sum(self.gigabytes.get(name, 1) for name in self.alive)
        own = self.garbage + GIGABYTE * models
        return MemoryUsage(self.used_by_others + own, self.total, own)

    def free_memory(self) -> None:
        gc.collect()
        self.garbage = 0

    def plan(self, entry: ModelEntry) -> LoadPlan:
        return LoadPlan(
            {"memory": GIGABYTE * self.gigabytes.get(entry.name, 1)},
            partial(self._load, entry),
            self.versions.get(entry.name, "first"),
        )

    def _load(self, entry: ModelEntry) -> PlacedModels:
        self.loads.append(entry.name)
        self.entered.release()
        if self.held:
            self.gate.acquire()
        if self.failures:
            raise self.failures.pop(0)
        model = FakeModel() if entry.task == "embed" else FakeReranker()
        model.name, model.offset = entry.public_name, 1.0
        self.alive[entry.name] = model
        device = loaded(FakeModel()).device
        device = replace(device, name=self.devices.get(entry.name, device.name))
        return placed([(device, model)])


def engine_with(
    loader: FakeLoader,
    *entries: ModelEntry,
    model: FakeModel | None = None,
    metrics: Metrics | None = None,
    request_timeout: float = 90,
    shutdown_timeout: float = 30,
    **settings: Any,
) -> EngineCore:
    """An engine with the default model `model`, and with further models."""
    models = loaded(model or FakeModel(), 100)
    settings = {"model_memory_threshold": 1.0} | settings
    return EngineCore(
        settings_of(models, models=entries, **settings),
        loading(models, loader=loader),
        metrics,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
    )


def entries(*names: str, **fields: Any) -> list[ModelEntry]:
    return [ModelEntry(name=name, **fields) for name in names]


def status(engine: EngineCore, name: str) -> ModelStatus:
    return next(status for status in engine.statuses if status.name == name)


async def reached(engine: EngineCore, name: str, state: ModelState) -> None:
    """Wait until a model is in a state."""
    while status(engine, name).state is not state:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0.002)


async def vector(engine: EngineCore, text: str, model: str | None = None) -> float:
    """Embed a text, and return the only number of its vector."""
    (embedding,) = (await engine.embed(EmbedRequest([text], model=model))).embeddings
    return float(embedding.dense[0])

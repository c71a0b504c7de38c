"""The models of MODELS: loaded when they are needed, unloaded when memory is.

A request leases its model. What nobody leases may be unloaded, the least recently used first,
unless it is pinned. Where a model is waited for and every other one is leased, one that has had its
turn gives way: new requests wait, it is unloaded after those that have it, and loaded again when
its turn comes. One model is loaded at a time, in a thread that leaves the processor to others.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import structlog

from app.engine.device_pool import DevicePool, device_of_model_failed
from app.engine.device_threads import DeviceThread
from app.engine.file_watch import FileWatch
from app.engine.loaded_models import LoadedModels, PlacedModels
from app.engine.model_memory import ModelMemory
from app.engine.model_state import ModelStatus
from app.engine.pooled_model import PooledModel, Residence, models_with
from app.errors import (
    DrainingError,
    LoadingError,
    ModelNotLoadedError,
    ModelTooLargeError,
    SmartEmbedderError,
    StartupError,
)
from app.observability.metrics import Metrics
from app.settings import Settings

log = structlog.get_logger(__name__)

# Bytes that are loaded in a second, before any were.
_USUAL_RATE = 200e6
# Of the time of a request; the rest is for its own work.
SHARE_FOR_LOADING = 0.9
# Of the time of a request that waits for another model, what one may serve meanwhile.
_SHARE_FOR_TURN = 0.25
# Seconds between two looks at the memory.
_PAUSE = 1.0


class ModelPool:
    """Loads and unloads models beside those that are there always, the `defaults`."""

    def __init__(self, settings: Settings, devices: DevicePool, metrics: Metrics) -> None:
        entries = settings.models or ()
        self._models = {entry.public_name: PooledModel(entry) for entry in entries}
        self._threshold = settings.model_memory_threshold
        self._request_timeout = settings.request_timeout
        self._devices = devices
        self._metrics = metrics
        for model in self._models.values():
            metrics.watch_further_model(model.name, partial(getattr, model, "leases"))
        self._one_at_a_time = asyncio.Lock()
        self._to_load: list[PooledModel] = []
        self._room_at = -math.inf
        self._lease_ended = asyncio.Event()
        self._bytes_per_second = _USUAL_RATE
        self._looked_at = -math.inf
        self._relief: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[object]] = set()
        self._starting = True
        self._abort_error: DrainingError | None = None
        self._defaults: LoadedModels | None = None

    @property
    def statuses(self) -> list[ModelStatus]:
        """The state of each."""
        return [model.status for model in self._models.values()]

    def loaded(self, name: str) -> LoadedModels | None:
        """What requests for this model work with; None while it is not loaded."""
        residence = self._models[name].residence
        return None if residence is None else residence.models

    async def start(self, defaults: LoadedModels) -> None:
        """Load the models that are there from the start; one that fails keeps nobody else out."""
        if not self._models:
            return
        if defaults.loader is None:
            raise StartupError("MODELS is set, and the loader of the models loads no further ones")
        self._defaults, self._loader = defaults, defaults.loader
        self._thread = DeviceThread("model-loader", defaults.loader.prepare_thread)
        models = list(self._models.values())
        self._memory = ModelMemory(models, defaults.loader, self._threshold)
        for model in self._models.values():
            if model.entry.load == "start":
                await self._begin(model)
        self._starting = False

    @asynccontextmanager
    async def lease(self, name: str, seconds: float | None) -> AsyncIterator[LoadedModels]:
        """What a request for this model works with, which stays loaded within the block.

        Waits at most so many seconds for its loading. Raises `LoadingError` where that takes
        longer, `ModelNotLoadedError` where it fails, and `ModelTooLargeError` where there is no
        room for it.
        """
        model = self._models[name]
        model.leases += 1
        try:
            most = SHARE_FOR_LOADING * self._request_timeout if seconds is None else seconds
            residence = await self._residence(model, most)
            if not self._devices.serves(residence.model):
                raise device_of_model_failed()
            model.users, model.promised_until = model.users + 1, 0.0
            try:
                yield residence.models
            finally:
                model.users -= 1
        finally:
            model.leases -= 1
            model.last_used = time.monotonic()
            self._lease_ended.set()
            self.relieve()

    def relieve(self) -> None:
        """After work was done, unload what is idle if too much memory is in use."""
        if self._defaults is None or self._relief is not None:
            return
        now = time.monotonic()
        if now < self._looked_at + _PAUSE:
            return
        self._looked_at = now
        if self._idle():
            self._relief = asyncio.create_task(self._relieve(), name="relieve-memory")

    def abort(self, error: DrainingError) -> None:
        """Fail every request that waits for a model."""
        self._abort_error = error
        for model in self._models.values():
            if model.loading is not None:
                model.loading.cancel()

    async def close(self) -> None:
        """End what goes on in the background; a thread that loads is left to itself."""
        loading = (model.loading for model in self._models.values())
        running = {task for task in (*loading, *self._finishing, self._relief) if task is not None}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for model in self._models.values():
            if model.residence is not None:
                await model.residence.watch.close()
        if self._defaults is not None:
            await self._thread.close(0)

    async def _residence(self, model: PooledModel, seconds: float) -> Residence:
        if model.residence is not None and model.residence.watch.problem is not None:
            await self._unload_changed(model, model.residence)
        if model.residence is None or model.gives_way:
            await self._wait_for(model, seconds)
        if model.residence is None:  # Unloaded again, which only its own file can cause.
            raise self._still_loading(model)
        return model.residence

    async def _unload_changed(self, model: PooledModel, residence: Residence) -> None:
        """Unload what reads from a file that was written to, so that it is loaded again."""
        if model.users or self._devices.is_using(residence.model):
            raise ModelNotLoadedError(
                f"a file of the model {model.name} was written to while the model read from it: it "
                "is loaded again when its other requests are over",
                retry_after=1,
            )
        await self._unload(model)

    async def _wait_for(self, model: PooledModel, seconds: float) -> None:
        if (refusal := model.refusal) is not None:
            raise refusal
        loading = self._begin(model)
        if not model.is_measured or self._seconds_left(model) <= seconds:
            await asyncio.wait({loading}, timeout=seconds)
        if self._abort_error is not None:
            raise DrainingError(str(self._abort_error), retry_after=self._abort_error.retry_after)
        if not loading.done():
            raise self._still_loading(model)
        if (error := loading.result()) is not None:
            raise type(error)(str(error), retry_after=error.retry_after)

    def _still_loading(self, model: PooledModel) -> LoadingError:
        left = math.ceil(self._seconds_left(model))
        model.promise(left)
        return LoadingError(f"the model {model.name} is still being loaded", retry_after=left)

    def _seconds_left(self, model: PooledModel) -> float:
        """Until it is loaded: those before it are first, and the first waits for its memory."""
        place = self._to_load.index(model) + 1 if model in self._to_load else 0
        models = self._to_load[:place] or [model]
        loading = sum(each.seconds_left(self._bytes_per_second) for each in models)
        return loading + max(0.0, self._room_at - time.monotonic())

    def _begin(self, model: PooledModel) -> "asyncio.Task[SmartEmbedderError | None]":
        """Load it, unless that is under way."""
        if model.loading is None:
            model.wait()
            self._to_load.append(model)
            model.loading = asyncio.create_task(self._load(model), name=f"load-{model.name}")
        return model.loading

    async def _load(self, model: PooledModel) -> SmartEmbedderError | None:
        """Load it when its turn comes; returns what its requests are told if that fails."""
        try:
            async with self._one_at_a_time:
                if model.residence is not None:  # It was to give way, and did not have to.
                    return None
                # As a value: whatever it is, those who wait must hear of it.
                (outcome,) = await asyncio.gather(self._bring(model), return_exceptions=True)
        finally:
            self._to_load.remove(model)
            model.loading = None
        if isinstance(outcome, Residence):
            self._note_success(model, outcome)
            return None
        if isinstance(outcome, LoadingError):  # Nobody waits for it any more.
            return outcome
        if not isinstance(outcome, Exception):
            raise outcome
        self._note_failure(model, outcome)
        return model.refusal

    def _note_success(self, model: PooledModel, residence: Residence) -> None:
        seconds = model.succeed(residence)
        self._bytes_per_second = model.nbytes / max(seconds, 1e-3) or _USUAL_RATE
        self._metrics.model_loads.labels(model.name, "success").inc()
        log.info("model_loaded", model=model.name, seconds=round(seconds, 2), bytes=model.nbytes)

    def _note_failure(self, model: PooledModel, error: Exception) -> None:
        own = isinstance(error, SmartEmbedderError)
        reason = str(error) if own else f"{type(error).__name__}: {error}"
        traceback = {} if own else {"exc_info": error}
        log.error("model_load_failed", model=model.name, reason=reason, **traceback)
        self._metrics.model_loads.labels(model.name, "failure").inc()
        model.fail(error if isinstance(error, ModelTooLargeError) else None)

    async def _bring(self, model: PooledModel) -> Residence:
        """Find it, make room for it, load it and let the devices serve it."""
        assert self._defaults is not None  # noqa: S101 - requests come after the start
        model.begin()
        plan = await self._thread.run(partial(self._loader.plan, model.entry))
        model.needs = plan.needs
        try:
            await self._make_room(model)
        finally:
            self._room_at = -math.inf
            for each in self._models.values():
                each.gives_way = False
        model.begin()
        placed = await self._thread.run(plan.load)
        residence = Residence(
            await self._devices.add(placed, thoroughly=self._starting),
            models_with(placed, model.entry.task, self._defaults),
            FileWatch(),
        )
        if placed.files is not None:
            residence.watch.start(placed.files)
        self._finish_later(placed)
        return residence

    def _finish_later(self, placed: PlacedModels) -> None:
        """Do what can wait; the next loading comes after it."""
        task = asyncio.create_task(self._thread.run(placed.finish), name="finish-loading")
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _make_room(self, model: PooledModel) -> None:
        """Unload idle models until there is room for this one; wait for those that are busy."""
        for memory in model.needs:
            # For what allocators keep, and what a request that has just ended still holds.
            pauses = [_PAUSE, 0.0]
            while (shortage := await self._memory.shortage_for(model, memory)) > 0:
                idle = self._idle(memory)
                busy = [each for each in self._memory.unpinned(memory) if each not in idle]
                if pauses and not idle:
                    await asyncio.sleep(pauses.pop())
                    await self._thread.run(self._loader.free_memory)
                    continue
                self._memory.require_enough(model, memory, shortage, [*idle, *busy])
                if idle:
                    await self._unload(idle[0])
                else:
                    await self._wait_for_lease_to_end(model, busy)

    async def _wait_for_lease_to_end(self, model: PooledModel, busy: list[PooledModel]) -> None:
        """Wait until a busy one may be idle; one that has had its turn has to become so."""
        if not model.is_held:
            used_by = ", ".join(each.name for each in busy)
            raise LoadingError(f"the memory for the model {model.name} is in use by {used_by}")
        longest = _SHARE_FOR_TURN * self._request_timeout
        first = min(busy, key=lambda each: each.turn_left(longest))
        left = first.turn_left(longest)
        first.gives_way = left <= 0
        self._room_at = time.monotonic() + left
        self._lease_ended.clear()
        # Now and then in any case: a batch whose caller has left ends no lease.
        pause = min(left, _PAUSE) if left > 0 else _PAUSE
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lease_ended.wait(), pause)

    async def _relieve(self) -> None:
        try:
            async with self._one_at_a_time:
                for memory in self._memory.in_use:
                    while await self._memory.left(memory) < 0 and (idle := self._idle(memory)):
                        await self._unload(idle[0])
        finally:
            self._relief = None

    def _idle(self, memory: str | None = None) -> list[PooledModel]:
        """Those that may be unloaded, the least recently used first."""
        return [each for each in self._memory.unpinned(memory) if not self._is_busy(each)]

    def _is_busy(self, model: PooledModel) -> bool:
        """Whether a request has it, or a batch whose caller has left."""
        residence = model.residence
        return model.is_held or (residence is not None and self._devices.is_using(residence.model))

    async def _unload(self, model: PooledModel) -> None:
        residence = model.leave()
        assert residence is not None  # noqa: S101 - only those that are loaded are unloaded
        self._devices.remove(residence.model)
        await residence.watch.close()
        del residence  # What is unreferenced can be given back.
        await self._thread.run(self._loader.free_memory)
        self._metrics.model_unloads.labels(model.name).inc()
        log.info("model_unloaded", model=model.name)

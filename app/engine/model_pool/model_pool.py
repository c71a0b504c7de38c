"""The models of MODELS: loaded when they are needed, unloaded when memory is.

A request leases its model. What nobody leases may be unloaded, the least recently used first,
unless it is pinned. Where a model is waited for and every other one is leased, one that has had its
turn gives way: new requests wait, it is unloaded after those that have it, and loaded again when
its turn comes. One model is loaded at a time, in a thread that leaves the processor to others.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import structlog

from app.engine import clock
from app.engine.devices.device_pool import DevicePool, device_of_model_failed
from app.engine.devices.device_threads import DeviceThread, ThreadFactory
from app.engine.loaded_models import LoadedModels
from app.engine.model_pool.loading_queue import LoadingQueue
from app.engine.model_pool.model_memory import ModelMemory
from app.engine.model_pool.model_room import PAUSE, ModelRoom
from app.engine.model_pool.model_state import ModelStatus
from app.engine.model_pool.pooled_model import PooledModel, Residence, models_with
from app.errors import (
    DrainingError,
    LoadingError,
    MemoryTakenError,
    ModelTooLargeError,
    SmartEmbedderError,
    StartupError,
    UnavailableError,
)
from app.observability.metrics import Metrics
from app.settings import Settings

log = structlog.get_logger(__name__)

# Of the time of a request; the rest is for its own work.
SHARE_FOR_LOADING = 0.9
# Of the time of a request that waits for another model, what one may serve meanwhile.
_SHARE_FOR_TURN = 0.25
# Seconds after which a command that came to nothing may be tried again.
_PAUSE_OF_COMMANDS = 10


class ModelPool:
    """Loads and unloads models beside those that are there always, the `defaults`."""

    def __init__(
        self,
        settings: Settings,
        devices: DevicePool,
        metrics: Metrics,
        make_thread: ThreadFactory = DeviceThread,
    ) -> None:
        entries = settings.models or ()
        self._models = {entry.public_name: PooledModel(entry) for entry in entries}
        self._threshold = settings.model_memory_threshold
        self._request_timeout = settings.request_timeout
        self._devices = devices
        self._metrics = metrics
        self._make_thread = make_thread
        for model in self._models.values():
            metrics.watch_further_model(model.name, partial(getattr, model, "leases"))
        self._one_at_a_time = asyncio.Lock()
        self._to_load = LoadingQueue()
        self._looked_at = -math.inf
        self._relief: asyncio.Task[None] | None = None
        self._starting = True
        self._commands: set[asyncio.Timeout] = set()
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
        self._thread = self._make_thread("model-loader", defaults.loader.prepare_thread)
        models = list(self._models.values())
        self._room = ModelRoom(
            ModelMemory(models, defaults.loader, self._threshold),
            self._devices,
            self._to_load,
            unload=self._unload,
            free_memory=self._free_memory,
            longest_turn=_SHARE_FOR_TURN * self._request_timeout,
        )
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
            model.last_used = clock.now()
            self._room.note_end_of_lease()
            self.relieve()

    async def unload(self, name: str) -> None:
        """Unload it after the requests that use it, also if it is pinned; later ones wait for it.

        Raises `UnavailableError` where it cannot be unloaded within the time of a request.
        """
        command = asyncio.timeout(None)
        self._commands.add(command)
        try:
            async with command:
                await self._unload_in_turn(self._models[name])
        except TimeoutError:
            raise self._aborted() from None
        finally:
            self._commands.discard(command)

    async def _unload_in_turn(self, model: PooledModel) -> None:
        async with AsyncExitStack() as alone:
            try:
                async with asyncio.timeout(SHARE_FOR_LOADING * self._request_timeout):
                    await alone.enter_async_context(self._one_at_a_time)
                    if model.residence is None:
                        return
                    model.gives_way = True
                    try:
                        await self._room.wait_until_idle(model)
                    finally:
                        model.gives_way = False
            except TimeoutError:
                raise UnavailableError(
                    f"the model {model.name} is still in use, or another one is still being loaded",
                    retry_after=_PAUSE_OF_COMMANDS,
                ) from None
            await self._unload(model)

    def relieve(self) -> None:
        """After work was done, unload what is idle if too much memory is in use."""
        if self._defaults is None or self._relief is not None:
            return
        now = clock.now()
        if now < self._looked_at + PAUSE:
            return
        self._looked_at = now
        if self._room.idle():
            self._relief = asyncio.create_task(self._relieve(), name="relieve-memory")

    def abort(self, error: DrainingError) -> None:
        """Fail every request that waits for a model, and every command."""
        self._abort_error = error
        for command in self._commands:
            command.reschedule(asyncio.get_running_loop().time())
        for model in self._models.values():
            if model.loading is not None:
                model.loading.cancel()

    async def close(self) -> None:
        """End what goes on in the background; a thread that loads is left to itself."""
        loading = (model.loading for model in self._models.values())
        running = {task for task in (*loading, self._relief) if task is not None}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self._defaults is not None:
            await self._thread.close(0)

    async def _residence(self, model: PooledModel, seconds: float) -> Residence:
        if model.residence is None or model.gives_way:
            await self._wait_for(model, seconds)
        if model.residence is None:  # Unloaded again before this request could go on.
            raise self._still_loading(model)
        return model.residence

    async def _wait_for(self, model: PooledModel, seconds: float) -> None:
        if (refusal := model.refusal) is not None:
            raise refusal
        loading = self._begin(model)
        if not model.is_measured or self._to_load.seconds_left(model) <= seconds:
            await asyncio.wait({loading}, timeout=seconds)
        if self._abort_error is not None:
            raise self._aborted()
        if not loading.done():
            raise self._still_loading(model)
        if (error := loading.result()) is not None:
            raise type(error)(str(error), retry_after=error.retry_after)

    def _aborted(self) -> DrainingError:
        error = self._abort_error
        assert error is not None  # noqa: S101 - only `abort` ends what waits
        return DrainingError(str(error), retry_after=error.retry_after)

    def _still_loading(self, model: PooledModel) -> LoadingError:
        left = math.ceil(self._to_load.seconds_left(model))
        model.promise(left)
        return LoadingError(f"the model {model.name} is still being loaded", retry_after=left)

    def _begin(self, model: PooledModel) -> "asyncio.Task[SmartEmbedderError | None]":
        """Load it, unless that is under way."""
        if model.loading is None:
            self._to_load.add(model)
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
        if isinstance(outcome, LoadingError) and not isinstance(outcome, MemoryTakenError):
            return outcome  # Nobody waits for it any more.
        if not isinstance(outcome, Exception):
            raise outcome
        self._note_failure(model, outcome)
        return model.refusal

    def _note_success(self, model: PooledModel, residence: Residence) -> None:
        seconds = model.succeed(residence)
        self._to_load.note_speed(model.nbytes, seconds)
        self._metrics.model_loads.labels(model.name, "success").inc()
        log.info("model_loaded", model=model.name, seconds=round(seconds, 2), bytes=model.nbytes)

    def _note_failure(self, model: PooledModel, error: Exception) -> None:
        if isinstance(error, MemoryTakenError):
            log.warning("model_waits_for_memory", model=model.name, reason=str(error))
            model.fail(error)
            return
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
            await self._room.make(model)
        finally:
            self._to_load.note_room()
            for each in self._models.values():
                each.gives_way = False
        model.begin()
        placed = await self._thread.run(plan.load)
        if model.has_other_files(plan.files):
            log.warning(
                "model_files_replaced",
                model=model.name,
                effect="its vectors may differ from those that it made before",
            )
            self._metrics.model_replacements.labels(model.name).inc()
        added = await self._devices.add(placed, thoroughly=self._starting)
        tokens = min(self._devices.token_budgets(model.name).values())
        return Residence(added, models_with(placed, model.entry.task, self._defaults, tokens))

    async def _relieve(self) -> None:
        try:
            async with self._one_at_a_time:
                await self._room.relieve()
        finally:
            self._relief = None

    async def _unload(self, model: PooledModel) -> None:
        residence = model.leave()
        assert residence is not None  # noqa: S101 - only those that are loaded are unloaded
        self._devices.remove(residence.model)
        del residence  # What is unreferenced can be given back.
        await self._free_memory()
        self._metrics.model_unloads.labels(model.name).inc()
        log.info("model_unloaded", model=model.name)

    async def _free_memory(self) -> None:
        """Give back to the system what is not referenced any more."""
        await self._thread.run(self._loader.free_memory)

"""The models: loaded at the start or when they are needed, unloaded when memory is.

A request leases its models. What nobody leases may be unloaded, the least recently used first,
unless it is pinned, as those that have settings of their own are. Where a model is waited for and
every other one is leased, one that has had its turn gives way: new requests wait, it is unloaded
after those that have it, and loaded again when its turn comes. After the start one model is loaded
at a time, in a thread that leaves the processor to others.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter

import structlog

from smart_embedder.engine.devices.pool import DevicePool, device_of_model_failed
from smart_embedder.engine.devices.thread import DeviceThread, ThreadFactory
from smart_embedder.engine.metrics import EngineMetrics
from smart_embedder.engine.model import (
    LoadedModels,
    Loader,
    ModelLoader,
    PlacedModels,
    human_size,
)
from smart_embedder.engine.pooled_model import ModelGroup, ModelStatus, PooledModel
from smart_embedder.engine.scheduling.admission import Abortable
from smart_embedder.engine.scheduling.fairness import failing_with
from smart_embedder.errors import (
    LoadingError,
    MemoryTakenError,
    ModelNotLoadedError,
    ModelTooLargeError,
    OutOfMemoryError,
    SmartEmbedderError,
    StartupError,
    UnavailableError,
)
from smart_embedder.settings.engine import LATE_INTERACTION, EngineSettings

log = structlog.get_logger(__name__)

# Seconds between two looks at the memory.
PAUSE = 1.0
# Of the time of a request; the rest is for its own work.
SHARE_FOR_LOADING = 0.9
# Of the time of a request that waits for another model, what one may serve meanwhile.
_SHARE_FOR_TURN = 0.25
# Seconds after which a command that came to nothing may be tried again.
_PAUSE_OF_COMMANDS = 10
# Bytes of a model that are loaded in a second, until one has been measured.
_USUAL_RATE = 200e6


class ModelPool:
    """Loads, leases and unloads the models of the settings.

    What waits within `accepted` ends when the engine is aborted.
    """

    def __init__(
        self,
        settings: EngineSettings,
        loader: Loader,
        devices: DevicePool,
        metrics: EngineMetrics,
        accepted: Abortable,
        *,
        request_timeout: float,
        make_thread: ThreadFactory = DeviceThread,
    ) -> None:
        self._load_defaults = partial(loader, settings)
        self._threshold = settings.model_memory_threshold
        self._request_timeout = request_timeout
        self._devices = devices
        self._metrics = metrics
        self._accepted = accepted
        self._make_thread = make_thread
        own = settings.default_entries
        embedder = PooledModel(own.embedder, is_default=True)
        dense = PooledModel(own.dense, is_default=True) if own.dense else None
        self._defaults = ModelGroup(
            embedder,
            dense,
            PooledModel(own.reranker, is_default=True) if own.reranker else None,
            late_interaction=settings.reranker_model == LATE_INTERACTION,
        )
        names = [model.name for model in self._defaults.members]
        self._groups: dict[str | None, ModelGroup] = dict.fromkeys((None, *names), self._defaults)
        # EMBEDDING_MODEL, named, makes the dense vectors, too.
        self._groups[embedder.name] = replace(self._defaults, dense=None)
        self._models = {entry.public_name: PooledModel(entry) for entry in settings.models or ()}
        for name, model in self._models.items():
            self._groups[name] = (
                ModelGroup(model)
                if model.entry.task == "embed"
                else ModelGroup(embedder, dense, reranker=model)
            )
        # It loads the default ones, and then the others, with their loader.
        self._thread = make_thread("model-loader", None)
        self._loader: ModelLoader
        self._one_at_a_time = asyncio.Lock()
        # The one that is being loaded first. It waits for memory until `_room_at`.
        self._to_load: list[PooledModel] = []
        self._room_at = -math.inf
        self._bytes_per_second = _USUAL_RATE
        self._lease_ended = asyncio.Event()
        self._looked_at = -math.inf
        self._relief: asyncio.Task[None] | None = None
        self._starting = True

    @property
    def statuses(self) -> list[ModelStatus]:
        """The state of each: the default ones, and then those of MODELS."""
        return [
            replace(model.status, token_budgets=self._devices.token_budgets(model.loaded))
            for model in (*self._defaults.members, *self._models.values())
        ]

    def loaded(self, name: str | None) -> LoadedModels:
        """What a lease of this model would yield at once.

        Raises `ModelNotLoadedError`, or what its requests are told after a failed loading.
        """
        group = self._groups[name]
        for each in group.members:
            if each.placed is None:
                raise each.refusal or ModelNotLoadedError(
                    f"the model {each.name} is not loaded now: the next request for vectors or "
                    "scores of it loads it"
                )
        return group.loaded

    async def start(self) -> None:
        """Load the models that are there from the start.

        Raises the error of a default one; one of MODELS that fails keeps nobody else out.
        """
        members = self._defaults.members
        try:
            loaded = await self._thread.run(self._load_defaults)
            for model, placed in zip(members, loaded.models, strict=True):
                await self._serve(model, placed)
        except Exception:
            for each in members:
                each.leave()
                each.fail(None)
            raise
        self._loader = loaded.loader
        await self._thread.close(0)
        self._thread = self._make_thread("model-loader", self._loader.prepare_thread)
        for each in self._models.values():
            if each.entry.load == "start":
                await self._begin(each)
        self._starting = False

    @asynccontextmanager
    async def lease(self, name: str | None, seconds: float | None) -> AsyncIterator[LoadedModels]:
        """What a request for this model works with, which stays loaded within the block.

        Without a name these are the default models together. Waits at most so many seconds for a
        loading. Raises `LoadingError` where that takes longer, `ModelNotLoadedError` where it
        fails, and `ModelTooLargeError` where there is no room for it.
        """
        group = self._groups[name]
        members = group.members
        for each in members:
            each.leases += 1
        try:
            most = SHARE_FOR_LOADING * self._request_timeout if seconds is None else seconds
            for each in members:
                if each.placed is None or each.gives_way:
                    await self._wait_for(each, most)
            for each in members:
                if each.placed is None:  # Unloaded before this request could go on.
                    raise self._still_loading(each)
                # Without the devices of the default ones there is no service.
                if not (each.is_default or self._devices.serves(each.placed.models[0].model)):
                    raise device_of_model_failed()
            for each in members:
                each.users, each.promised_until = each.users + 1, 0.0
            try:
                yield group.loaded
            finally:
                for each in members:
                    each.users -= 1
        finally:
            for each in members:
                each.leases -= 1
                each.last_used = time.perf_counter()
            self._lease_ended.set()
            self.relieve()

    def end_pause(self, name: str) -> None:
        """Let the next request try to load it, if that has failed of late."""
        self._models[name].paused_until = 0.0

    async def unload(self, name: str) -> None:
        """Unload one of MODELS after the requests that use it, even if it is pinned.

        Later requests wait for it. Raises `UnavailableError` where it cannot be unloaded within the
        time of a request.
        """
        model = self._models[name]
        message = f"the model {model.name} is still in use, or another one is still being loaded"
        refusal = partial(UnavailableError, message, retry_after=_PAUSE_OF_COMMANDS)
        async with (
            self._accepted.scope(),
            failing_with(refusal, SHARE_FOR_LOADING * self._request_timeout) as timeout,
            self._one_at_a_time,
        ):
            if model.placed is None:
                return
            model.gives_way = True
            try:
                # Requests that have waited for its loading use it before.
                while model.is_awaited or self._is_busy(model):
                    await self._lease_end(PAUSE)
            finally:
                model.gives_way = False
            timeout.reschedule(None)
            await self._unload(model)

    def relieve(self) -> None:
        """After work was done, unload what is idle if too much memory is in use."""
        if self._relief is not None or not self._models:
            return
        now = time.perf_counter()
        if now < self._looked_at + PAUSE:
            return
        self._looked_at = now
        if self._idle():
            self._relief = asyncio.create_task(self._relieve(), name="relieve-memory")

    async def close(self, seconds: float) -> None:
        """End what goes on in the background; the start gets `seconds` for what it loads."""
        loading = (model.loading for model in self._models.values())
        running = {task for task in (*loading, self._relief) if task is not None}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self._thread.close(seconds if self._starting else 0)

    async def _wait_for(self, model: PooledModel, seconds: float) -> None:
        if (refusal := model.refusal) is not None:
            raise refusal
        loading = self._begin(model)
        if not model.is_measured or self._seconds_left(model) <= seconds:
            async with self._accepted.scope():
                await asyncio.wait({loading}, timeout=seconds)
        if not loading.done():
            raise self._still_loading(model)
        if (error := loading.result()) is not None:
            raise type(error)(str(error), retry_after=error.retry_after)

    def _still_loading(self, model: PooledModel) -> LoadingError:
        left = math.ceil(self._seconds_left(model))
        model.promise(left)
        return LoadingError(f"the model {model.name} is still being loaded", retry_after=left)

    def _seconds_left(self, model: PooledModel) -> float:
        """Until the model is loaded, those before it included."""
        place = self._to_load.index(model) + 1 if model in self._to_load else 0
        models = self._to_load[:place] or [model]
        loading = sum(each.seconds_left(self._bytes_per_second) for each in models)
        return loading + max(0.0, self._room_at - time.perf_counter())

    def _begin(self, model: PooledModel) -> "asyncio.Task[SmartEmbedderError | None]":
        """Load it, unless that is under way."""
        if model.loading is None:
            model.began = None
            self._to_load.append(model)
            model.loading = asyncio.create_task(self._load(model), name=f"load-{model.name}")
        return model.loading

    async def _load(self, model: PooledModel) -> SmartEmbedderError | None:
        """Load it when its turn comes; returns what its requests are told if that fails."""
        try:
            async with self._one_at_a_time:
                if model.placed is not None:  # It was to give way, and did not have to.
                    return None
                await self._bring(model)
        except Exception as error:  # noqa: BLE001 - those who wait must hear of whatever it is
            return self._failed(model, error)
        finally:
            self._to_load.remove(model)
            model.loading = None
        seconds, size = model.load_seconds or 0.0, model.nbytes
        self._bytes_per_second = size / max(seconds, 1e-3) or _USUAL_RATE
        self._metrics.loaded(model.name, ok=True)
        log.info("model_loaded", model=model.name, seconds=round(seconds, 2), bytes=size)
        return None

    def _failed(self, model: PooledModel, error: Exception) -> SmartEmbedderError | None:
        if isinstance(error, MemoryTakenError):
            log.warning("model_waits_for_memory", model=model.name, reason=str(error))
            model.fail(error)
        elif isinstance(error, LoadingError):
            return error  # Nobody waits for it any more.
        else:
            own = isinstance(error, SmartEmbedderError)
            reason = str(error) if own else f"{type(error).__name__}: {error}"
            traceback = {} if own else {"exc_info": error}
            log.error("model_load_failed", model=model.name, reason=reason, **traceback)
            self._metrics.loaded(model.name, ok=False)
            model.fail(error if isinstance(error, ModelTooLargeError) else None)
        return model.refusal

    async def _bring(self, model: PooledModel) -> None:
        """Find it, make room for it, load it and let the devices serve it."""
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
        if model.has_other_files(plan.files):
            log.warning(
                "model_files_replaced",
                model=model.name,
                effect="its vectors may differ from those that it made before",
            )
            self._metrics.replaced(model.name)
        await self._serve(model, placed)

    async def _serve(self, model: PooledModel, placed: PlacedModels) -> None:
        """Let the devices serve what was loaded."""
        try:
            served = await self._devices.add(
                placed, thoroughly=self._starting, is_default=model.is_default
            )
        except OutOfMemoryError as error:
            # What the device's library said, where it was that which had too little.
            told = "; ".join(getattr(error, "__notes__", (str(error),)))
            raise StartupError(
                f"{model.name} does not fit the memory of its device: {told}"
            ) from error
        model.succeed(placed, min(self._devices.token_budgets(served).values()))

    async def _make_room(self, model: PooledModel) -> None:
        """Unload idle models until there is room for this one; wait for those that are busy.

        Raises `ModelTooLargeError` where no waiting helps, `MemoryTakenError` where other programs
        hold the memory, and `LoadingError` where nobody waits for the model any more.
        """
        for memory, needed in model.needs.items():
            has_freed = has_paused = False
            while (shortage := needed - await self._left(memory)) > 0:
                idle = self._idle(memory)
                busy = [each for each in self._unpinned(memory) if each not in idle]
                most = sum(each.needs[memory] for each in (*idle, *busy))
                if not has_freed:
                    # What allocators keep counts as in use, and must neither unload nor refuse.
                    await self._free_memory()
                    has_freed = True
                elif not has_paused and not (idle and shortage <= most):
                    # For what a request that has just ended still holds.
                    await asyncio.sleep(PAUSE)
                    await self._free_memory()
                    has_paused = True
                elif shortage > most:
                    raise await self._refusal(model, memory, shortage - most)
                elif idle:
                    await self._unload(idle[0])
                else:
                    await self._wait_for_lease_to_end(model, busy)

    async def _left(self, memory: str) -> int:
        """Bytes that are free below the threshold; negative if more is in use."""
        usage = await asyncio.to_thread(self._loader.read_memory, memory)
        return int(usage.total * self._threshold) - usage.used

    async def _refusal(
        self, model: PooledModel, memory: str, missing: int
    ) -> MemoryTakenError | ModelTooLargeError:
        """The error of a model that lacks so many bytes even with all others unloaded.

        `MemoryTakenError` where it would fit without the memory of other programs.
        """
        needed = model.needs[memory]
        usage = await asyncio.to_thread(self._loader.read_memory, memory)
        if missing <= usage.of_others:
            return MemoryTakenError(
                f"the model {model.name} needs {human_size(needed)} of the memory of {memory}, of "
                f"which other programs hold {human_size(usage.of_others)}: it is loaded when they "
                "have left enough"
            )
        return ModelTooLargeError(
            f"the model {model.name} needs {human_size(needed)} of the memory of {memory}, and at "
            f"most {human_size(max(0, needed - missing))} can be had below "
            f"MODEL_MEMORY_THRESHOLD={self._threshold:g}, where pinned models and the default ones "
            "stay"
        )

    def _idle(self, memory: str | None = None) -> list[PooledModel]:
        """The models that may be unloaded, the least recently used first."""
        return [each for each in self._unpinned(memory) if not self._is_busy(each)]

    def _unpinned(self, memory: str | None = None) -> list[PooledModel]:
        """The loaded models, in this memory or in any, the least recently used first."""
        loaded = (
            model
            for model in self._models.values()
            if model.placed is not None
            and not model.entry.pinned
            and (memory is None or memory in model.needs)
        )
        return sorted(loaded, key=lambda model: model.last_used)

    def _is_busy(self, model: PooledModel) -> bool:
        """Whether a request has it, or a batch whose caller has left."""
        loaded = model.loaded
        return model.is_held or (loaded is not None and self._devices.is_using(loaded))

    async def _wait_for_lease_to_end(self, model: PooledModel, busy: list[PooledModel]) -> None:
        """Wait until a busy one may be idle; one that has had its turn has to become so."""
        if not model.is_held:
            used_by = ", ".join(each.name for each in busy)
            raise LoadingError(f"the memory for the model {model.name} is in use by {used_by}")
        longest = _SHARE_FOR_TURN * self._request_timeout
        left, first = min(((each.turn_left(longest), each) for each in busy), key=itemgetter(0))
        first.gives_way = left <= 0
        self._room_at = time.perf_counter() + left
        await self._lease_end(min(left, PAUSE) if left > 0 else PAUSE)

    async def _lease_end(self, most: float) -> None:
        """Wait for a lease to end, at most so long: a batch whose caller has left ends none.

        `asyncio.wait_for` would lose a cancellation at that moment (in Python 3.11), and whoever
        ends the service would wait.
        """
        self._lease_ended.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(most):
                await self._lease_ended.wait()

    async def _relieve(self) -> None:
        """Unload idle models while more memory is in use than the threshold allows."""
        try:
            async with self._one_at_a_time:
                for memory in dict.fromkeys(
                    name for each in self._unpinned() for name in each.needs
                ):
                    if await self._left(memory) < 0:
                        await self._free_memory()
                    while await self._left(memory) < 0 and (idle := self._idle(memory)):
                        await self._unload(idle[0])
        finally:
            self._relief = None

    async def _unload(self, model: PooledModel) -> None:
        self._groups[model.name].forget()
        loaded = model.leave()
        assert loaded is not None  # noqa: S101 - only those that are loaded are unloaded
        self._devices.remove(loaded)
        del loaded  # What is unreferenced can be given back.
        await self._free_memory()
        self._metrics.unloaded(model.name)
        log.info("model_unloaded", model=model.name)

    async def _free_memory(self) -> None:
        """Give back to the system what is not referenced any more."""
        await self._thread.run(self._loader.free_memory)

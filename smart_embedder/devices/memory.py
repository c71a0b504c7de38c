"""The models in memory: load them when requests need them, and unload the least recently used.

A request leases its models, and they stay loaded while it does. If a model is not loaded, the
loader thread loads it, one model at a time. The request waits for at most its share of the time
limit, and then gets 503 with a Retry-After. If a load needs memory, or if more memory is in use
than MODEL_MEMORY_THRESHOLD allows, the least recently used model is unloaded. Default models,
pinned models and models in use are never unloaded. If all models are in use, the model that was
loaded first is closed once it has served for four times its load time: its requests are finished,
and new ones wait until it is loaded again. In this way, models that do not fit together alternate.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

import structlog

from smart_embedder.devices.pool import DevicePool, model_device_failed_error
from smart_embedder.devices.thread import DeviceThread, ThreadFactory
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
from smart_embedder.interface import (
    SHARE_FOR_LOADING,
    LoadedModels,
    Loader,
    ModelAbilities,
    ModelLoader,
    ModelState,
    ModelStatus,
    PlacedModels,
    ReadyModel,
    human_size,
)
from smart_embedder.interrupts import failing_with
from smart_embedder.metrics import EngineMetrics
from smart_embedder.scheduling.admission import Abortable
from smart_embedder.settings import LATE_INTERACTION, EngineSettings, ModelEntry

log = structlog.get_logger(__name__)

# Seconds between two checks of the memory, and between two checks whether a model is in use.
MEMORY_CHECK_INTERVAL, _USE_CHECK_INTERVAL = 1.0, 0.05
# Seconds until a load may be retried after an error, or when other programs use the memory.
_RETRY_FAILED, _RETRY_MEMORY = 30, 10
# The expected seconds of a model's first load.
_USUAL_LOAD = 10.0
# The longest Retry-After in seconds: with longer ones, some clients do not retry at all.
_LONGEST_RETRY_AFTER = 30
# Before it is closed, a model serves for this many times its load time, but at least the minimum
# in seconds and at most the share of REQUEST_TIMEOUT.
_SERVICE_PER_LOAD, _MIN_SERVICE_SECONDS, _MAX_SERVICE_SHARE = 4, 2.0, 0.25


@dataclass(slots=True, eq=False)
class PooledModel:
    """A model of the settings, loaded or not. Use it in the event loop's thread only.

    - A default model (`is_default`) is loaded at startup.
    - `requests` is the number of requests that use the model or wait for it, and `uses` the number
      that use it. Until `kept_until`, a request is expected that was told to retry.
    - While the model is `closed`, new requests wait.
    - `needs` are the bytes that it needs of each memory.
    - `ready` is set while it is loaded, and `loading` is the task that loads it.
    - After a failed load, requests are refused until `retry_at`.
    - `replaced` counts the loads that found other `files` than the load before.
    """

    entry: ModelEntry
    is_default: bool = False
    requests: int = 0
    uses: int = 0
    kept_until: float = 0.0
    closed: bool = False
    last_used: float = 0.0
    needs: Mapping[str, int] = field(default_factory=dict)
    ready: ReadyModel | None = None
    loading: asyncio.Task[None] | None = None
    loaded_at: float = 0.0
    load_seconds: float | None = None
    failure: UnavailableError | None = None
    retry_at: float = 0.0
    files: str | None = None
    replaced: int = 0

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.entry.public_name

    @property
    def refusal(self) -> UnavailableError | None:
        """The error of requests until a failed load may be retried, else None."""
        left = math.ceil(self.retry_at - time.perf_counter())
        if self.failure is None or left <= 0:
            return None
        # A model that is too large does not fit later either.
        retry_after = None if isinstance(self.failure, ModelTooLargeError) else left
        return type(self.failure)(str(self.failure), retry_after=retry_after)

    @property
    def state(self) -> ModelState:
        """The state, as /health shows it."""
        if self.ready is not None:
            return ModelState.READY
        if self.loading is not None or (self.is_default and self.failure is None):
            return ModelState.LOADING
        if isinstance(self.failure, MemoryTakenError):
            return ModelState.UNLOADED if self.refusal is None else ModelState.LOADING
        return ModelState.UNLOADED if self.failure is None else ModelState.FAILED

    @property
    def status(self) -> ModelStatus:
        """The model, as /health shows it."""
        ready, task = self.ready, self.entry.task
        return ModelStatus(
            self.name,
            task,
            self.state,
            pinned=self.entry.pinned,
            # A request without a model leases all default models, so their numbers say nothing.
            requests=None if self.is_default else self.requests,
            load_seconds=self.load_seconds,
            reason=str(self.failure) if self.failure else None,
            files_replaced=self.replaced,
            info=ready.info if ready else None,
            makes=ModelAbilities.of(ready.model, task) if ready else None,
        )

    @property
    def is_open(self) -> bool:
        """True if a request may use the model at once."""
        return self.ready is not None and not self.closed

    def fail(self, error: Exception) -> None:
        """Record that the load failed. Requests are refused until it may be retried."""
        is_taken = isinstance(error, MemoryTakenError)
        self.retry_at = time.perf_counter() + (_RETRY_MEMORY if is_taken else _RETRY_FAILED)
        if isinstance(error, MemoryTakenError | ModelTooLargeError):
            self.failure = error
        else:  # The message of the error may name folders of this machine.
            message = f"the model {self.name} could not be loaded; the log says why"
            self.failure = ModelNotLoadedError(message)


class ModelPool:
    """Loads, leases and unloads the models of the settings.

    Requests wait in scopes of `accepted`, so that they end when the engine is aborted.
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
        self._settings = settings
        self._request_timeout = request_timeout
        self._devices = devices
        self._metrics = metrics
        self._accepted = accepted
        self._make_thread = make_thread
        defaults = settings.default_entries
        self._defaults = [PooledModel(entry, is_default=True) for entry in defaults if entry]
        self._models = {entry.public_name: PooledModel(entry) for entry in settings.models or ()}
        self._all = (*self._defaults, *self._models.values())
        # The default models, and the loaded models of MODELS, by the model name in a request.
        self._loaded: dict[str | None, LoadedModels] = {}
        self._default_embedders: list[ReadyModel] = []
        # Loads the default models. `start` then replaces it by a thread for the others.
        self._thread = make_thread("model-loader", None)
        self._loader: ModelLoader
        # Held while a model is loaded or unloaded.
        self._load_lock = asyncio.Lock()
        self._starting = True
        self._watch: asyncio.Task[None] | None = None

    @property
    def statuses(self) -> list[ModelStatus]:
        """The state of each model: first the default models, then those of MODELS."""
        budgets = self._devices.token_budgets
        return [
            replace(model.status, token_budgets=budgets(model.ready.model if model.ready else None))
            for model in self._all
        ]

    def loaded(self, name: str | None) -> LoadedModels:
        """Return what a lease of this model would yield, without waiting.

        Raises `ModelNotLoadedError`, or the error of a failed load.
        """
        if (loaded := self._loaded.get(name)) is not None:
            return loaded
        refusal = self._models[name].refusal if name in self._models else None
        raise refusal or ModelNotLoadedError(
            f"the model {name} is not loaded now: the next request for vectors or scores of it "
            "loads it"
        )

    async def start(self) -> None:
        """Load the default models, and start to load those of MODELS with `load: start`.

        Raises the error of a default model. The error of another model fails only its requests.
        """
        tasks = [model.entry.task for model in self._defaults]
        try:
            loaded = await self._thread.run(self._load_defaults)
            pairs = zip(self._defaults, loaded.models, strict=True)
            ready = [await self._serve(model, placed) for model, placed in pairs]
        except Exception as error:
            for model in self._defaults:
                model.ready = None
                model.fail(error)
            raise
        self._default_embedders = ready[: tasks.count("embed")]
        reranker = ready[-1] if "rerank" in tasks else None
        late = self._settings.reranker_model == LATE_INTERACTION
        together = LoadedModels.of(self._default_embedders, reranker, late_interaction=late)
        self._loaded = dict.fromkeys((None, *(model.name for model in self._defaults)), together)
        # A request that names EMBEDDING_MODEL gets its dense vectors too.
        first = self._default_embedders[:1]
        alone = LoadedModels.of(first, reranker, late_interaction=late)
        self._loaded[self._defaults[0].name] = alone
        self._loader = loaded.loader
        await self._thread.close(0)
        self._thread = self._make_thread("model-loader", self._loader.prepare_thread)
        for model in self._models.values():
            if model.entry.load == "start":
                await self._start_loading(model)
        self._starting = False
        if self._models:
            self._watch = asyncio.create_task(self._watch_memory(), name="watch-memory")

    @asynccontextmanager
    async def lease(self, name: str | None, seconds: float | None) -> AsyncIterator[LoadedModels]:
        """Lease a model, or without a name the default models; they stay loaded in the block.

        Waits at most `seconds` for a load. Raises `LoadingError` if the load takes longer,
        `ModelNotLoadedError` if it fails, and `ModelTooLargeError` if there is no memory for it.
        """
        model = self._models.get(name) if name else None
        if model is None:  # Default models are never unloaded.
            yield self._loaded[name]
            return
        model.requests += 1
        try:
            if not model.is_open:
                await self._wait_for(model, seconds)
            # Default models need no check: without their devices, the service is unhealthy.
            if not (model.ready and self._devices.serves(model.ready.model)):
                raise model_device_failed_error()
            model.uses, model.kept_until = model.uses + 1, 0.0
            try:
                yield self._loaded[name]
            finally:
                model.uses -= 1
        finally:
            model.requests -= 1
            model.last_used = time.perf_counter()

    def allow_retry(self, name: str) -> None:
        """Let the next request load the model, even if a load has just failed."""
        self._models[name].retry_at = 0.0

    async def unload(self, name: str) -> None:
        """Unload a model of MODELS, even a pinned one, after the requests that use it.

        New requests wait in the meantime. Raises `UnavailableError` if the model cannot be unloaded
        within the time limit of a request.
        """
        model = self._models[name]
        message = f"the model {name} is still in use, or another one is still being loaded"
        refusal = partial(UnavailableError, message, retry_after=_RETRY_MEMORY)
        async with (
            self._accepted.scope(),
            failing_with(refusal, SHARE_FOR_LOADING * self._request_timeout) as timeout,
            self._load_lock,
        ):
            if model.ready is None:
                return
            model.closed = True
            try:
                while self._is_used(model):  # noqa: ASYNC110 - no event for a cancelled batch
                    await asyncio.sleep(_USE_CHECK_INTERVAL)
            finally:
                model.closed = False
            timeout.reschedule(None)
            await self._unload(model)

    async def close(self, seconds: float) -> None:
        """End the background tasks; during startup, wait `seconds` for the loader thread."""
        loads = (model.loading for model in self._models.values())
        running = {task for task in (*loads, self._watch) if task is not None}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self._thread.close(seconds if self._starting else 0)

    async def _wait_for(self, model: PooledModel, seconds: float | None) -> None:
        """Load the model and wait until a request may use it."""
        if seconds is None:
            seconds = SHARE_FOR_LOADING * self._request_timeout
        still_loading = partial(_still_loading_error, model)
        async with self._accepted.scope(), failing_with(still_loading, seconds):
            while not model.is_open:
                if (refusal := model.refusal) is not None:
                    raise refusal
                await asyncio.wait({self._start_loading(model)})

    def _start_loading(self, model: PooledModel) -> asyncio.Task[None]:
        """Start to load the model, unless it is being loaded; return the task.

        The load continues if all requests that wait for it are cancelled.
        """
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model), name=f"load-{model.name}")
        return model.loading

    async def _load(self, model: PooledModel) -> None:
        """Load the model after earlier loads; record the error if that fails."""
        try:
            async with self._load_lock:
                if model.ready is None:  # It may have been closed, but not unloaded.
                    await self._make_room_and_load(model)
        except Exception as error:  # noqa: BLE001 - waiting requests get the error
            self._record_failure(model, error)
        finally:
            model.loading = None

    def _record_failure(self, model: PooledModel, error: Exception) -> None:
        model.fail(error)
        if isinstance(error, MemoryTakenError):
            log.warning("model_waits_for_memory", model=model.name, reason=str(error))
            return
        is_known = isinstance(error, SmartEmbedderError)
        reason = str(error) if is_known else f"{type(error).__name__}: {error}"
        traceback = {} if is_known else {"exc_info": error}
        log.error("model_load_failed", model=model.name, reason=reason, **traceback)
        self._metrics.loaded(model.name, ok=False)

    async def _make_room_and_load(self, model: PooledModel) -> None:
        plan = await self._thread.run(partial(self._loader.plan, model.entry))
        model.needs = plan.needs
        try:
            for memory in model.needs:
                await self._make_room(model, memory)
        finally:
            for other in self._models.values():
                other.closed = False
        began = time.perf_counter()
        placed = await self._thread.run(plan.load)
        if model.files not in {None, plan.files}:
            log.warning(
                "model_files_replaced",
                model=model.name,
                effect="its vectors may differ from those that it made before",
            )
            self._metrics.replaced(model.name)
            model.replaced += 1
        model.files = plan.files
        ready = await self._serve(model, placed)
        model.load_seconds = time.perf_counter() - began
        embedders = self._default_embedders
        self._loaded[model.name] = {
            "embed": partial(LoadedModels.of, [ready]),
            "rerank": partial(LoadedModels.of, embedders, ready),
            "extract": partial(LoadedModels.of, embedders, extractor=ready),
        }[model.entry.task]()
        self._metrics.loaded(model.name, ok=True)
        seconds, size = round(model.load_seconds, 2), sum(model.needs.values())
        log.info("model_loaded", model=model.name, seconds=seconds, bytes=size)

    async def _serve(self, model: PooledModel, placed: PlacedModels) -> ReadyModel:
        """Let the devices serve the loaded model."""
        try:
            served = await self._devices.add(
                placed, thoroughly=self._starting, is_default=model.is_default
            )
        except OutOfMemoryError as error:
            # The notes hold the message of the device's library.
            reason = "; ".join(getattr(error, "__notes__", (str(error),)))
            raise StartupError(
                f"{model.name} does not fit the memory of its device: {reason}"
            ) from error
        max_batch_tokens = min(self._devices.token_budgets(served).values())
        model.ready = ReadyModel(placed, placed.describe(), max_batch_tokens)
        model.failure = None
        model.last_used = model.loaded_at = time.perf_counter()
        return model.ready

    async def _make_room(self, model: PooledModel, memory: str) -> None:
        """Unload models until there is enough memory for this one.

        If unloading all of them would not be enough, unloads none, and raises `MemoryTakenError` if
        other programs use the memory, else `ModelTooLargeError`.
        """
        has_freed = has_waited = False
        while (missing := model.needs[memory] - await self._read_free_bytes(memory)) > 0:
            models = self._find_unpinned(memory)
            lacking = missing - sum(other.needs[memory] for other in models)
            if not has_freed:
                # Memory cached by allocators counts as in use: release it before a model.
                await self._free_memory()
                has_freed = True
            elif lacking <= 0:
                await self._unload_one_of(models)
            elif not has_waited:
                # A request that has just ended may still hold memory.
                await asyncio.sleep(MEMORY_CHECK_INTERVAL)
                await self._free_memory()
                has_waited = True
            else:
                raise await self._no_memory_error(model, memory, lacking)

    async def _unload_one_of(self, models: list[PooledModel]) -> None:
        """Unload the first unused model; if all are used, wait, or close the one loaded first."""
        for model in models:
            if not self._is_used(model):
                await self._unload(model)
                return
        oldest = min(models, key=attrgetter("loaded_at"))
        seconds = max(_MIN_SERVICE_SECONDS, _SERVICE_PER_LOAD * (oldest.load_seconds or 0.0))
        seconds = min(seconds, _MAX_SERVICE_SHARE * self._request_timeout)
        oldest.closed = time.perf_counter() >= oldest.loaded_at + seconds
        await asyncio.sleep(_USE_CHECK_INTERVAL)

    async def _no_memory_error(
        self, model: PooledModel, memory: str, lacking: int
    ) -> MemoryTakenError | ModelTooLargeError:
        """Return the error of a model that lacks bytes even if all other models are unloaded.

        It is `MemoryTakenError` if the model would fit without the memory of other programs.
        """
        usage = await asyncio.to_thread(self._loader.read_memory, memory)
        needed = model.needs[memory]
        needs = f"the model {model.name} needs {human_size(needed)} of the memory of {memory}, and "
        if lacking <= usage.of_others:
            return MemoryTakenError(
                f"{needs}other programs use {human_size(usage.of_others)}: it is loaded when "
                "enough is free"
            )
        return ModelTooLargeError(
            f"{needs}at most {human_size(max(0, needed - lacking))} can be freed below "
            f"MODEL_MEMORY_THRESHOLD={self._settings.model_memory_threshold:g}, because default "
            "and pinned models stay"
        )

    async def _read_free_bytes(self, memory: str) -> int:
        """Return the free bytes below the threshold; negative if more memory is in use."""
        usage = await asyncio.to_thread(self._loader.read_memory, memory)
        return int(usage.total * self._settings.model_memory_threshold) - usage.used

    def _find_unpinned(self, memory: str) -> list[PooledModel]:
        """Return the unpinned models in this memory, the least recently used first."""
        loaded = (
            model
            for model in self._models.values()
            if model.ready is not None and not model.entry.pinned and memory in model.needs
        )
        return sorted(loaded, key=attrgetter("last_used"))

    def _is_used(self, model: PooledModel) -> bool:
        """Return True if a request uses or awaits the model, or a batch or job still needs it."""
        is_awaited = model.requests > 0 or time.perf_counter() < model.kept_until
        return (
            model.uses > 0
            or (is_awaited and not model.closed)
            or (model.ready is not None and self._devices.is_using(model.ready.model))
        )

    async def _watch_memory(self) -> None:
        """Unload unused models while more memory is in use than the threshold allows."""
        while True:
            await asyncio.sleep(MEMORY_CHECK_INTERVAL)
            try:
                async with self._load_lock:
                    for memory in {name for model in self._models.values() for name in model.needs}:
                        await self._unload_above_threshold(memory)
            except Exception:  # The next check may succeed.
                log.exception("memory_not_relieved")

    async def _unload_above_threshold(self, memory: str) -> None:
        has_freed = False
        while self._find_unused(memory) and await self._read_free_bytes(memory) < 0:
            if not has_freed:
                await self._free_memory()
                has_freed = True
            elif unused := self._find_unused(memory):  # A request may have arrived since then.
                await self._unload(unused[0])

    def _find_unused(self, memory: str) -> list[PooledModel]:
        """Return the models in this memory that may be unloaded, least recently used first."""
        return [model for model in self._find_unpinned(memory) if not self._is_used(model)]

    async def _unload(self, model: PooledModel) -> None:
        assert model.ready is not None  # noqa: S101 - only loaded models are unloaded
        self._devices.remove(model.ready.model)
        # Drop all references first, so that the memory can be released.
        model.ready, model.closed = None, False
        del self._loaded[model.name]
        await self._free_memory()
        self._metrics.unloaded(model.name)
        log.info("model_unloaded", model=model.name)

    async def _free_memory(self) -> None:
        """Return unreferenced memory to the system."""
        await self._thread.run(self._loader.free_memory)


def _still_loading_error(model: PooledModel) -> LoadingError:
    """Return the error of a request that waited too long; keep the model until it is retried."""
    seconds = min(math.ceil(model.load_seconds or _USUAL_LOAD), _LONGEST_RETRY_AFTER)
    model.kept_until = time.perf_counter() + seconds + 1
    return LoadingError(f"the model {model.name} is still being loaded", retry_after=seconds)

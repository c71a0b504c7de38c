"""The loaded models, the least recently used of which are unloaded where memory is short.

A request leases its models, and so counts as a use of them: one that is not loaded is loaded by the
loader's thread, one model at a time, while the request waits its share of the time limit, after
which it gets 503 with a Retry-After. Before a load that needs room, and in the background while
more memory is in use than MODEL_MEMORY_THRESHOLD allows, the least recently used model is unloaded
that nobody uses and that is not pinned, as the default models are. Where every model is in use, the
one that was loaded first is closed after its turn (four times its load): its requests are finished,
new ones wait for it to be loaded again, and so models that do not fit together take turns.
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

from smart_embedder.devices.pool import DevicePool, device_of_model_failed
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

# Seconds between two looks at the memory, and between two at whether a model is still in use.
PAUSE, _LOOK = 1.0, 0.05
# Seconds until a failed load is tried again, and one for which other programs hold the memory.
_RETRY_FAILED, _RETRY_MEMORY = 30, 10
# The expected seconds of a model's first load.
_USUAL_LOAD = 10.0
# The most seconds of Retry-After: clients that are told more do not come again.
_LONGEST_RETRY_AFTER = 30
# The seconds that a model serves at least before it is closed, and the share of REQUEST_TIMEOUT
# that it serves at most.
_SHORTEST_TURN, _LONGEST_TURN = 2.0, 0.25
_TURN_PER_LOAD = 4


@dataclass(slots=True, eq=False)
class PooledModel:
    """One model; to be used in the event loop's thread only.

    One that `is_default` is loaded at the start. `requests` counts those that use it or wait for
    it, and `uses` those that use it. Until `kept_until` a request may come that was told to come
    again. While it is `closed`, requests wait. `needs` are the bytes that it takes of each memory.
    While it is loaded, it is `ready`. `loading` is the task that loads it. After a failure requests
    are refused until `retry_at`. `replaced` counts the loads that found other `files` than the one
    before.
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
        """The error of requests until a failed load is tried again; None at other times."""
        left = math.ceil(self.retry_at - time.perf_counter())
        if self.failure is None or left <= 0:
            return None
        # Waiting alone makes no room.
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
            # A request that names no model has all default ones, whichever it needs.
            requests=None if self.is_default else self.requests,
            load_seconds=self.load_seconds,
            reason=str(self.failure) if self.failure else None,
            files_replaced=self.replaced,
            info=ready.info if ready else None,
            makes=ModelAbilities.of(ready.model, task) if ready else None,
        )

    @property
    def is_open(self) -> bool:
        """Whether a request may use it at once."""
        return self.ready is not None and not self.closed

    def fail(self, error: Exception) -> None:
        """Note that it could not be loaded: requests are refused until it is tried again."""
        is_taken = isinstance(error, MemoryTakenError)
        self.retry_at = time.perf_counter() + (_RETRY_MEMORY if is_taken else _RETRY_FAILED)
        if isinstance(error, MemoryTakenError | ModelTooLargeError):
            self.failure = error
        else:  # The reason may name folders of this machine.
            message = f"the model {self.name} could not be loaded; the log says why"
            self.failure = ModelNotLoadedError(message)


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
        # The default models, and those of MODELS while they are loaded, by the name in a request.
        self._loaded: dict[str | None, LoadedModels] = {}
        self._embedders: list[ReadyModel] = []  # The default ones.
        # It loads the default models, and then the others, with their loader.
        self._thread = make_thread("model-loader", None)
        self._loader: ModelLoader
        # Held by whoever loads or unloads.
        self._one_at_a_time = asyncio.Lock()
        self._starting = True
        self._watch: asyncio.Task[None] | None = None

    @property
    def statuses(self) -> list[ModelStatus]:
        """The state of each model: the default ones, and then those of MODELS."""
        budgets = self._devices.token_budgets
        return [
            replace(model.status, token_budgets=budgets(model.ready.model if model.ready else None))
            for model in self._all
        ]

    def loaded(self, name: str | None) -> LoadedModels:
        """What a lease of this model would yield at once.

        Raises `ModelNotLoadedError`, or what its requests are told after a failed load.
        """
        if (loaded := self._loaded.get(name)) is not None:
            return loaded
        refusal = self._models[name].refusal if name in self._models else None
        raise refusal or ModelNotLoadedError(
            f"the model {name} is not loaded now: the next request for vectors or scores of it "
            "loads it"
        )

    async def start(self) -> None:
        """Load the models that are there from the start.

        Raises the error of a default one; one of MODELS that fails keeps nobody else out.
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
        self._embedders = ready[: tasks.count("embed")]
        reranker = ready[-1] if "rerank" in tasks else None
        late = self._settings.reranker_model == LATE_INTERACTION
        together = LoadedModels.of(self._embedders, reranker, late_interaction=late)
        self._loaded = dict.fromkeys((None, *(model.name for model in self._defaults)), together)
        # EMBEDDING_MODEL, named, makes the dense vectors, too.
        first = self._embedders[:1]
        alone = LoadedModels.of(first, reranker, late_interaction=late)
        self._loaded[self._defaults[0].name] = alone
        self._loader = loaded.loader
        await self._thread.close(0)
        self._thread = self._make_thread("model-loader", self._loader.prepare_thread)
        for model in self._models.values():
            if model.entry.load == "start":
                await self._begin(model)
        self._starting = False
        if self._models:
            self._watch = asyncio.create_task(self._watch_memory(), name="watch-memory")

    @asynccontextmanager
    async def lease(self, name: str | None, seconds: float | None) -> AsyncIterator[LoadedModels]:
        """The models of a request for this one, which stay loaded within the block.

        Without a name these are the default models together. Waits at most `seconds` for a load.
        Raises `LoadingError` where that takes longer, `ModelNotLoadedError` where it fails, and
        `ModelTooLargeError` where there is no room for it.
        """
        model = self._models.get(name) if name else None
        if model is None:  # It is never unloaded.
            yield self._loaded[name]
            return
        model.requests += 1
        try:
            if not model.is_open:
                await self._wait_for(model, seconds)
            # A default model without a device ends the service: see `DevicePool.failure`.
            if not (model.ready and self._devices.serves(model.ready.model)):
                raise device_of_model_failed()
            model.uses, model.kept_until = model.uses + 1, 0.0
            try:
                yield self._loaded[name]
            finally:
                model.uses -= 1
        finally:
            model.requests -= 1
            model.last_used = time.perf_counter()

    def retry_at_once(self, name: str) -> None:
        """Let the next request try to load it, also if that has just failed."""
        self._models[name].retry_at = 0.0

    async def unload(self, name: str) -> None:
        """Unload one of MODELS after the requests that use it, even if it is pinned.

        Later requests wait for it. Raises `UnavailableError` where it cannot be unloaded within the
        time of a request.
        """
        model = self._models[name]
        message = f"the model {name} is still in use, or another one is still being loaded"
        refusal = partial(UnavailableError, message, retry_after=_RETRY_MEMORY)
        async with (
            self._accepted.scope(),
            failing_with(refusal, SHARE_FOR_LOADING * self._request_timeout) as timeout,
            self._one_at_a_time,
        ):
            if model.ready is None:
                return
            model.closed = True
            try:
                while self._is_used(model):  # noqa: ASYNC110 - a leaver's batch sets no event
                    await asyncio.sleep(_LOOK)
            finally:
                model.closed = False
            timeout.reschedule(None)
            await self._unload(model)

    async def close(self, seconds: float) -> None:
        """End the work in the background; the start gets `seconds` for what it loads."""
        loads = (model.loading for model in self._models.values())
        running = {task for task in (*loads, self._watch) if task is not None}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self._thread.close(seconds if self._starting else 0)

    async def _wait_for(self, model: PooledModel, seconds: float | None) -> None:
        """Have it loaded, and wait for that."""
        if seconds is None:
            seconds = SHARE_FOR_LOADING * self._request_timeout
        still_loading = partial(_still_loading, model)
        async with self._accepted.scope(), failing_with(still_loading, seconds):
            while not model.is_open:
                if (refusal := model.refusal) is not None:
                    raise refusal
                await asyncio.wait({self._begin(model)})

    def _begin(self, model: PooledModel) -> asyncio.Task[None]:
        """Load it, unless that is under way; this goes on if nobody waits for it any more."""
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model), name=f"load-{model.name}")
        return model.loading

    async def _load(self, model: PooledModel) -> None:
        """Load it after those that were asked for before it; note the error if that fails."""
        try:
            async with self._one_at_a_time:
                if model.ready is None:  # Otherwise it was closed and not unloaded.
                    await self._make_room_and_load(model)
        except Exception as error:  # noqa: BLE001 - those who wait must hear of whatever it is
            self._fail(model, error)
        finally:
            model.loading = None

    def _fail(self, model: PooledModel, error: Exception) -> None:
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
        embeds = model.entry.task == "embed"
        self._loaded[model.name] = (
            LoadedModels.of([ready]) if embeds else LoadedModels.of(self._embedders, ready)
        )
        self._metrics.loaded(model.name, ok=True)
        seconds, size = round(model.load_seconds, 2), sum(model.needs.values())
        log.info("model_loaded", model=model.name, seconds=seconds, bytes=size)

    async def _serve(self, model: PooledModel, placed: PlacedModels) -> ReadyModel:
        """Let the devices serve what was loaded."""
        try:
            served = await self._devices.add(
                placed, thoroughly=self._starting, is_default=model.is_default
            )
        except OutOfMemoryError as error:
            # The message of the device's library, where that ran out of memory.
            told = "; ".join(getattr(error, "__notes__", (str(error),)))
            raise StartupError(
                f"{model.name} does not fit the memory of its device: {told}"
            ) from error
        max_batch_tokens = min(self._devices.token_budgets(served).values())
        model.ready = ReadyModel(placed, placed.describe(), max_batch_tokens)
        model.failure = None
        model.last_used = model.loaded_at = time.perf_counter()
        return model.ready

    async def _make_room(self, model: PooledModel, memory: str) -> None:
        """Unload models until there is room for this one in a memory.

        Where all of them would not do, it unloads none, and raises `MemoryTakenError` if other
        programs hold the memory, or else `ModelTooLargeError`.
        """
        has_freed = has_waited = False
        while (missing := model.needs[memory] - await self._left(memory)) > 0:
            models = self._unpinned(memory)
            lacking = missing - sum(other.needs[memory] for other in models)
            if not has_freed:
                # Memory that allocators keep counts as in use, and must not unload a model.
                await self._free_memory()
                has_freed = True
            elif lacking <= 0:
                await self._unload_one_of(models)
            elif not has_waited:
                # For the memory that a request holds which has just ended.
                await asyncio.sleep(PAUSE)
                await self._free_memory()
                has_waited = True
            else:
                raise await self._no_room(model, memory, lacking)

    async def _unload_one_of(self, models: list[PooledModel]) -> None:
        """Unload the first that is not used; if all are, wait, or close the one loaded first."""
        for model in models:
            if not self._is_used(model):
                await self._unload(model)
                return
        oldest = min(models, key=attrgetter("loaded_at"))
        turn = max(_SHORTEST_TURN, _TURN_PER_LOAD * (oldest.load_seconds or 0.0))
        turn = min(turn, _LONGEST_TURN * self._request_timeout)
        oldest.closed = time.perf_counter() >= oldest.loaded_at + turn
        await asyncio.sleep(_LOOK)

    async def _no_room(
        self, model: PooledModel, memory: str, lacking: int
    ) -> MemoryTakenError | ModelTooLargeError:
        """The error of a model that lacks so many bytes even with all others unloaded.

        `MemoryTakenError` where it would fit without the memory of other programs.
        """
        usage = await asyncio.to_thread(self._loader.read_memory, memory)
        needed = model.needs[memory]
        needs = f"the model {model.name} needs {human_size(needed)} of the memory of {memory}, "
        if lacking <= usage.of_others:
            return MemoryTakenError(
                f"{needs}of which other programs hold {human_size(usage.of_others)}: it is loaded "
                "when they have left enough"
            )
        return ModelTooLargeError(
            f"{needs}and at most {human_size(max(0, needed - lacking))} can be had below "
            f"MODEL_MEMORY_THRESHOLD={self._settings.model_memory_threshold:g}, where pinned "
            "models and the default ones stay"
        )

    async def _left(self, memory: str) -> int:
        """Bytes that are free below the threshold; negative if more is in use."""
        usage = await asyncio.to_thread(self._loader.read_memory, memory)
        return int(usage.total * self._settings.model_memory_threshold) - usage.used

    def _unpinned(self, memory: str) -> list[PooledModel]:
        """The models loaded in this memory, the least recently used first."""
        loaded = (
            model
            for model in self._models.values()
            if model.ready is not None and not model.entry.pinned and memory in model.needs
        )
        return sorted(loaded, key=attrgetter("last_used"))

    def _is_used(self, model: PooledModel) -> bool:
        """Whether a request has it, or is about to, or a batch whose caller has left."""
        is_awaited = model.requests > 0 or time.perf_counter() < model.kept_until
        return (
            model.uses > 0
            or (is_awaited and not model.closed)
            or (model.ready is not None and self._devices.is_using(model.ready.model))
        )

    async def _watch_memory(self) -> None:
        """Unload unused models while more memory is in use than the threshold allows."""
        while True:
            await asyncio.sleep(PAUSE)
            try:
                async with self._one_at_a_time:
                    for memory in {name for model in self._models.values() for name in model.needs}:
                        await self._relieve(memory)
            except Exception:  # The next look may succeed.
                log.exception("memory_not_relieved")

    async def _relieve(self, memory: str) -> None:
        has_freed = False
        while self._unused(memory) and await self._left(memory) < 0:
            if not has_freed:
                await self._free_memory()
                has_freed = True
            elif unused := self._unused(memory):  # A request may have come in the meantime.
                await self._unload(unused[0])

    def _unused(self, memory: str) -> list[PooledModel]:
        """The models in this memory that may be unloaded now, the least recently used first."""
        return [model for model in self._unpinned(memory) if not self._is_used(model)]

    async def _unload(self, model: PooledModel) -> None:
        assert model.ready is not None  # noqa: S101 - only those that are loaded are unloaded
        self._devices.remove(model.ready.model)
        # Memory that nothing refers to can be given back.
        model.ready, model.closed = None, False
        del self._loaded[model.name]
        await self._free_memory()
        self._metrics.unloaded(model.name)
        log.info("model_unloaded", model=model.name)

    async def _free_memory(self) -> None:
        """Give back to the system what is not referenced any more."""
        await self._thread.run(self._loader.free_memory)


def _still_loading(model: PooledModel) -> LoadingError:
    """The error of a request whose time is over; the model is kept until it comes again."""
    seconds = min(math.ceil(model.load_seconds or _USUAL_LOAD), _LONGEST_RETRY_AFTER)
    model.kept_until = time.perf_counter() + seconds + 1
    return LoadingError(f"the model {model.name} is still being loaded", retry_after=seconds)

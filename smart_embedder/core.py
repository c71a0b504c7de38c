"""The engine's public class: `async with Engine(settings, load_models) as engine: ...`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Self, TypeVar

from smart_embedder.devices.memory import ModelPool
from smart_embedder.devices.pool import DevicePool, get_error
from smart_embedder.devices.thread import DeviceThread, ThreadFactory
from smart_embedder.errors import DrainingError, LoadingError, UnhealthyError
from smart_embedder.interface import LoadedModels, Loader, ModelStatus
from smart_embedder.metrics import EngineMetrics
from smart_embedder.pipelines.cache import CachedPipeline
from smart_embedder.pipelines.embedding import EmbeddingPipeline
from smart_embedder.pipelines.reranking import ScoringPipeline
from smart_embedder.requests import EmbedRequest, Purpose, RerankRequest
from smart_embedder.results import EmbeddingResult, RerankResult
from smart_embedder.scheduling.admission import (
    Abortable,
    Admission,
    ConcurrencyLimit,
    TokenizerThreads,
)
from smart_embedder.scheduling.queue import JobQueue
from smart_embedder.settings import EngineSettings

Result = TypeVar("Result")

# The most seconds that a request waits for a place before it is refused.
_ACQUIRE_TIMEOUT = 0.5


class ActiveRequests:
    """The number of requests in work, and an event for when there is none."""

    def __init__(self) -> None:
        self._count = 0
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count one request within the block."""
        self._count += 1
        self._none_left.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none_left.set()

    @property
    def count(self) -> int:
        """How many requests are in work."""
        return self._count

    async def wait_for_none(self) -> None:
        """Wait until no request is in work."""
        await self._none_left.wait()


class EngineCore:
    """Owns the models, the queue and the device threads.

    `start` loads the models. Until it returns, when the engine `is_ready`, and while it is
    `closing`, since `close` was called, `lease` refuses with an `UnavailableError`. `embed` and
    `rerank` lease the models of their request; who has a lease gives its models to `embedding` and
    `scoring`, because a second lease within it would wait where the model has to be evicted. Usable
    in-process as an async context manager. `make_thread` makes the threads of the devices and of
    the loader. The loading of a model may take most of `request_timeout`, and `close` waits for
    accepted requests for `shutdown_timeout`, both in seconds.
    """

    def __init__(
        self,
        settings: EngineSettings,
        loader: Loader,
        metrics: EngineMetrics | None = None,
        make_thread: ThreadFactory = DeviceThread,
        *,
        request_timeout: float = 90,
        shutdown_timeout: float = 30,
    ) -> None:
        self._shutdown_timeout = shutdown_timeout
        self._metrics = metrics or EngineMetrics()
        self._queue = JobQueue()
        self._devices = DevicePool(settings, self._queue, self._metrics, make_thread)
        self._accepted = Abortable()
        self._models = ModelPool(
            settings,
            loader,
            self._devices,
            self._metrics,
            self._accepted,
            request_timeout=request_timeout,
            make_thread=make_thread,
        )
        threads = settings.tokenizer_threads
        self._tokenizer_threads = TokenizerThreads(None if threads == "auto" else threads)
        admission = Admission(self._queue, self._tokenizer_threads, self._accepted, self._metrics)
        waiting = self._limit(
            settings.max_queue_size, "embedding requests wait (MAX_QUEUE_SIZE)", Purpose.EMBEDDING
        )
        scored = self._limit(
            settings.rerank_max_queue,
            "rerank requests are in work (RERANK_MAX_QUEUE)",
            Purpose.RERANKING,
        )
        size = settings.embedding_cache_bytes
        self.cache = CachedPipeline(admission, waiting, size, self._metrics) if size else None
        self.embedding = EmbeddingPipeline(admission, waiting)
        if self.cache is not None:
            self.embedding = self.cache
        self.scoring = ScoringPipeline(admission, scored, settings.rerank_gpu_timeout)
        self._requests = ActiveRequests()
        self.is_ready = self.closing = self._aborted = False
        self._starting: asyncio.Task[None] | None = None
        self._waiting = waiting

    def _limit(self, capacity: int, what: str, purpose: Purpose) -> ConcurrencyLimit:
        full = f"the queue is full: {capacity} {what}"
        estimate_retry_after = partial(self._devices.estimate_retry_after, purpose)
        return ConcurrencyLimit(capacity, _ACQUIRE_TIMEOUT, full, estimate_retry_after)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def waiting(self) -> int:
        """How many embedding requests wait."""
        return self._waiting.held

    @property
    def stuck_seconds(self) -> float:
        """Seconds since a forward last returned, while one takes over twice its limit; else 0."""
        return self._devices.stuck_seconds

    def loaded(self, model: str | None = None) -> LoadedModels:
        """What a lease of `model` would yield at once.

        Raises `LoadingError` before the end of the start, `UnhealthyError` where that has failed,
        and `ModelNotLoadedError`.
        """
        if not self.is_ready:
            self._require_start()
        return self._models.loaded(model)

    @property
    def statuses(self) -> list[ModelStatus]:
        """The state of each model: the default ones, and then those of MODELS."""
        return self._models.statuses

    @property
    def failed_devices(self) -> list[str]:
        """The devices that have failed and are out of service; the others serve on."""
        return self._devices.failed

    @property
    def failure(self) -> Exception | None:
        """The fault after which only a restart helps, if there is one."""
        cause = get_error(self._starting)
        if cause is None:
            return self._devices.failure
        # The cause may name folders of this machine, so clients get another message.
        error = UnhealthyError("the models could not be loaded; the log says why")
        error.__cause__ = cause
        return error

    async def start(self) -> None:
        """Load and warm the models; raises `StartupError` if that fails."""
        self._starting = asyncio.create_task(self._models.start(), name="load-models")
        await self._starting
        self.is_ready = True

    async def close(self) -> None:
        """Refuse new requests, serve the accepted ones, and end the threads; end a start, too.

        Requests that are not served within SHUTDOWN_TIMEOUT are aborted. A forward that is still
        running then gets that long again to return, or no time after `abort`.
        """
        self.closing = True
        if self._starting is not None:  # Or it would start threads after those here have ended.
            self._starting.cancel()
            await asyncio.wait({self._starting})
        try:
            async with asyncio.timeout(self._shutdown_timeout):
                await self._requests.wait_for_none()
        except TimeoutError:
            self.abort()
            await self._requests.wait_for_none()
        seconds = 0 if self._aborted else self._shutdown_timeout
        await self._models.close(seconds)
        await self._devices.close(seconds)
        self._tokenizer_threads.close()

    def abort(self) -> None:
        """Fail every accepted request: each waiting caller gets a `DrainingError`."""
        self.closing = self._aborted = True
        self._accepted.abort()

    async def embed(self, request: EmbedRequest) -> EmbeddingResult:
        """Embed texts; a text's vectors never depend on the other texts.

        Raises `EmptyInputError` without texts, `InvalidRequestError` where nothing is asked for or
        an option has no effect, `KindNotMadeError` for a kind that is not made, `TextTooLongError`
        where a text may not be cut, `UnavailableError` (loading, draining, unhealthy, queue full,
        out of memory), `InferenceTimeoutError` where a forward takes too long, or `InferenceError`.
        """
        async with self.lease(request.model) as models:
            return await self.embedding.embed(models, request)

    async def run_tokenizer(
        self,
        call: Callable[[LoadedModels], Result],
        texts: list[str],
        *,
        client: str = "",
        model: str | None = None,
    ) -> Result:
        """The result of `call`, which tokenises `texts` with the models.

        `model` is as in `lease`. Takes no place in the queue. Raises `UnavailableError` as `embed`
        does.
        """
        async with self.lease(model) as models, self._accepted.scope():
            return await self._tokenizer_threads.run(partial(call, models), texts, client)

    async def rerank(self, request: RerankRequest) -> RerankResult:
        """Score each passage for the query; the scores are in the order of the passages.

        Raises `EmptyInputError` for a blank query or without passages, `RerankerDisabledError`
        where RERANKER_MODEL is none, `InferenceTimeoutError` where the forwards take longer than
        RERANK_GPU_TIMEOUT, and the other errors of `embed`.
        """
        async with self.lease(request.model) as models:
            return await self.scoring.rerank(models, request)

    @asynccontextmanager
    async def lease(
        self, model: str | None = None, seconds: float | None = None
    ) -> AsyncIterator[LoadedModels]:
        """Accept a request; its models stay loaded, and `close` waits, until the block ends.

        `model` is the name of any model that is served; without it, the default models work
        together. One of MODELS that is not loaded is waited for, at most `seconds` (nine tenths of
        REQUEST_TIMEOUT by default). Raises `UnavailableError` as `embed` does.
        """
        self._require_ready()
        with self._requests.track():
            async with self._models.lease(model, seconds) as models:
                yield models

    async def load(self, model: str) -> None:
        """Load a model of MODELS, if it is not loaded, also in the pause after a failed loading.

        Raises the errors of `lease`.
        """
        self._models.allow_retry(model)
        async with self.lease(model):
            pass

    async def unload(self, model: str) -> None:
        """Unload a model of MODELS after the requests that use it; later ones load it again.

        Raises `UnavailableError` as `embed` does, and where those requests take too long.
        """
        self._require_ready()
        with self._requests.track():
            await self._models.unload(model)

    def _require_ready(self) -> None:
        if self.closing:
            raise DrainingError("the service is shutting down", retry_after=5)
        self._require_start()

    def _require_start(self) -> None:
        failure = self.failure
        if failure is not None:
            raise UnhealthyError(str(failure), retry_after=30) from failure.__cause__
        if not self.is_ready:
            raise LoadingError("the models are still being loaded", retry_after=5)

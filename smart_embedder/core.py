"""`EngineCore`: the models, the queue and the devices behind the service and `Engine`."""

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
from smart_embedder.pipelines.extraction import ExtractionPipeline
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

# Seconds that a request waits for a permit before it is refused.
_ACQUIRE_TIMEOUT = 0.5


class ActiveRequests:
    """Counts the requests in progress, and waits until there is none."""

    def __init__(self) -> None:
        self._count = 0
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count a request in the block."""
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
        """The number of requests in progress."""
        return self._count

    async def wait_for_none(self) -> None:
        """Wait until no request is in progress."""
        await self._none_left.wait()


class EngineCore:
    """Owns the models, the queue and the device threads. Use it with `async with`.

    `start` loads the models. Until it has returned (`is_ready`), and once `close` was called
    (`closing`), `lease` raises an `UnavailableError`.

    `embed` and `rerank` lease the models of their request. If you have a lease already, call
    `embedding` or `scoring` with its models: a second lease could wait for the first to end.

    `make_thread` makes the threads of the devices and of the loader. A load may take most of
    `request_timeout` seconds, and `close` waits for accepted requests for `shutdown_timeout`
    seconds.
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
        waiting = self._make_limit(
            settings.max_queue_size, "embedding requests wait (MAX_QUEUE_SIZE)", Purpose.EMBEDDING
        )
        scored = self._make_limit(
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
        self.extraction = ExtractionPipeline(admission, waiting)
        self._requests = ActiveRequests()
        self.is_ready = self.closing = self._aborted = False
        self._starting: asyncio.Task[None] | None = None
        self._waiting = waiting

    def _make_limit(self, capacity: int, subject: str, purpose: Purpose) -> ConcurrencyLimit:
        message = f"the queue is full: {capacity} {subject}"
        retry_after = partial(self._devices.estimate_retry_after, purpose)
        return ConcurrencyLimit(capacity, _ACQUIRE_TIMEOUT, message, retry_after)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def waiting(self) -> int:
        """The number of embedding requests that wait."""
        return self._waiting.held

    @property
    def stuck_seconds(self) -> float:
        """Seconds since a stuck device returned from a forward; 0 if none is stuck."""
        return self._devices.stuck_seconds

    def loaded(self, model: str | None = None) -> LoadedModels:
        """Return what a lease of `model` would yield, without waiting.

        Raises `LoadingError` during startup, `UnhealthyError` if it has failed, and
        `ModelNotLoadedError`.
        """
        if not self.is_ready:
            self._require_start()
        return self._models.loaded(model)

    @property
    def statuses(self) -> list[ModelStatus]:
        """The state of each model: first the default models, then those of MODELS."""
        return self._models.statuses

    @property
    def failed_devices(self) -> list[str]:
        """The names of the devices that have failed; the others continue to serve."""
        return self._devices.failed

    @property
    def failure(self) -> Exception | None:
        """The error after which only a restart helps, or None."""
        cause = get_error(self._starting)
        if cause is None:
            return self._devices.failure
        # Clients get another message, because the cause may name folders of this machine.
        error = UnhealthyError("the models could not be loaded; the log says why")
        error.__cause__ = cause
        return error

    async def start(self) -> None:
        """Load and warm the models; raise `StartupError` if that fails."""
        self._starting = asyncio.create_task(self._models.start(), name="load-models")
        await self._starting
        self.is_ready = True

    async def close(self) -> None:
        """Refuse new requests, serve the accepted ones, and end the threads.

        Requests that are not served within SHUTDOWN_TIMEOUT are aborted. A forward that is still
        running gets the same time to return, or none after `abort`. A running `start` is cancelled.
        """
        self.closing = True
        if self._starting is not None:  # It could start threads after the others have ended.
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
        """Fail all accepted requests with a `DrainingError`."""
        self.closing = self._aborted = True
        self._accepted.abort()

    async def embed(self, request: EmbedRequest) -> EmbeddingResult:
        """Embed texts. The vectors of a text never depend on the other texts.

        Raises:
        - `EmptyInputError` without texts,
        - `InvalidRequestError` if no output is asked for or an option has no effect,
        - `KindNotMadeError` for a kind of vectors that no model computes,
        - `TextTooLongError` for a text above the token limit if `truncate` is False,
        - `UnavailableError` (loading, draining, unhealthy, queue full, out of memory),
        - `InferenceTimeoutError` if a forward takes too long,
        - `InferenceError` if the model fails.
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
        """Run `call`, which tokenizes `texts` with the models, and return its result.

        It does not wait in the queue. `model` is as in `lease`. Raises `UnavailableError` as
        `embed` does.
        """
        async with self.lease(model) as models, self._accepted.scope():
            return await self._tokenizer_threads.run(partial(call, models), texts, client)

    async def rerank(self, request: RerankRequest) -> RerankResult:
        """Score each passage for the query; the scores are in the order of the passages.

        Raises `EmptyInputError` for a blank query or without passages, `RerankerDisabledError` if
        RERANKER_MODEL is none, `InferenceTimeoutError` if the forwards take longer than
        RERANK_GPU_TIMEOUT, and the other errors of `embed`.
        """
        async with self.lease(request.model) as models:
            return await self.scoring.rerank(models, request)

    @asynccontextmanager
    async def lease(
        self, model: str | None = None, seconds: float | None = None
    ) -> AsyncIterator[LoadedModels]:
        """Accept a request: until the block ends, its models stay loaded, and `close` waits.

        `model` is the name of any served model; without it, the default models serve the request
        together. If a model of MODELS is not loaded, waits for it for at most `seconds` (by default
        nine tenths of REQUEST_TIMEOUT). Raises `UnavailableError` as `embed` does.
        """
        self._require_ready()
        with self._requests.track():
            async with self._models.lease(model, seconds) as models:
                yield models

    async def load(self, model: str) -> None:
        """Load a model of MODELS, unless it is loaded. A load that has just failed is retried.

        Raises the errors of `lease`.
        """
        self._models.allow_retry(model)
        async with self.lease(model):
            pass

    async def unload(self, model: str) -> None:
        """Unload a model of MODELS after the requests that use it; later requests load it again.

        Raises `UnavailableError` as `embed` does, and if the requests take too long.
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

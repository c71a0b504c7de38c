"""The engine's face: `async with Engine(settings, load_models) as engine: ...`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from app.engine.active_requests import ActiveRequests
from app.engine.admission import Admission
from app.engine.batcher import DEFAULT_URGENCY
from app.engine.cached_forwards import with_cache
from app.engine.classification import ClassificationPipeline, ClassificationRequest
from app.engine.concurrency import ConcurrencyLimit
from app.engine.device_pool import DevicePool
from app.engine.embedding import EmbeddingPipeline
from app.engine.failure import find_failure, start_failure
from app.engine.file_watch import FileWatch
from app.engine.forwards import Forwards
from app.engine.loaded_models import LoadedModels, Loader
from app.engine.model_pool import ModelPool
from app.engine.model_state import ModelState, ModelStatus, default_statuses
from app.engine.option_checks import check_options, find_prompt, wanted_kinds
from app.engine.options import NO_OPTIONS, EmbeddingOptions
from app.engine.queue import JobQueue
from app.engine.reranking import RerankingPipeline, RerankRequest
from app.engine.tokenizer_threads import TokenizerThreads
from app.engine.types import ClassificationResult, EmbeddingResult, Outputs, RerankResult
from app.engine.vector_cache import make_cache
from app.errors import (
    DrainingError,
    EmptyInputError,
    InvalidRequestError,
    LoadingError,
    UnhealthyError,
)
from app.observability.metrics import Metrics
from app.settings import Settings

Result = TypeVar("Result")

ACQUIRE_TIMEOUT = 0.5


class Engine:
    """Owns the models, the queue and the device threads.

    `start` loads the models; until it returns, and after `close` was called, `embed` refuses with
    an `UnavailableError`. Usable in-process as an async context manager.
    """

    def __init__(self, settings: Settings, loader: Loader, metrics: Metrics | None = None) -> None:
        self._settings = settings
        self._metrics = metrics or Metrics()
        self._loader = loader
        threads = settings.tokenizer_threads
        self._tokenizer_threads = TokenizerThreads(None if threads == "auto" else threads)
        self._queue = JobQueue()
        self._file_watch = FileWatch()
        self._devices = DevicePool(settings, self._queue, self._metrics)
        self._further = ModelPool(settings, self._devices, self._metrics)
        admission = Admission(self._queue, self._tokenizer_threads, self._metrics)
        waiting = self._limit(settings.max_queue_size, "embedding requests wait (MAX_QUEUE_SIZE)")
        reranking = self._limit(
            settings.rerank_max_queue, "rerank requests are in work (RERANK_MAX_QUEUE)"
        )
        self._cache = make_cache(settings, self._metrics)
        source = with_cache(Forwards(admission, waiting), self._cache, admission, self._metrics)
        self._embedding = EmbeddingPipeline(admission, source)
        limit = settings.rerank_gpu_timeout
        self._reranking = RerankingPipeline(admission, reranking, limit)
        self._classification = ClassificationPipeline(admission, reranking, limit)
        self._models: LoadedModels | None = None
        self._requests = ActiveRequests()
        self._closing = self._aborted = False
        self._loading: asyncio.Future[LoadedModels] | None = None
        self._show(waiting)

    def _show(self, waiting: ConcurrencyLimit) -> None:
        """Connect the gauges: they read queue and device when they are scraped."""
        metrics, settings = self._metrics, self._settings
        metrics.watch_queue(lambda: waiting.held)
        metrics.watch_device(lambda: self._devices.stuck_seconds)
        metrics.set_capacities(embedding=settings.max_queue_size, rerank=settings.rerank_max_queue)
        metrics.watch_models(
            [status.name for status in self.statuses],
            [state.value for state in ModelState],
            lambda place: self.statuses[place].state.value,
        )

    def _limit(self, capacity: int, what: str) -> ConcurrencyLimit:
        full = f"the queue is full: {capacity} {what}"
        return ConcurrencyLimit(capacity, ACQUIRE_TIMEOUT, full, self._devices.seconds_to_clear)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def models(self) -> LoadedModels | None:
        """The warm models, or None while they are being loaded."""
        return self._models

    def loaded(self, model: str | None = None) -> LoadedModels | None:
        """What requests for a model of MODELS, or for none, work with; None if it is not there."""
        return self._models if model is None else self._further.loaded(model)

    @property
    def statuses(self) -> list[ModelStatus]:
        """The state of each model: the default ones, and then those of MODELS."""
        has_failed = start_failure(self._loading) is not None
        own = default_statuses(self._settings, self._models, has_failed=has_failed)
        return [*own, *self._further.statuses]

    @property
    def closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    @property
    def failed_devices(self) -> list[str]:
        """The devices that have failed and are out of service; the others serve on."""
        return self._devices.failed

    @property
    def failure(self) -> Exception | None:
        """The fault that only a restart repairs, or None (start, device, file or consumer)."""
        return find_failure(
            self._loading, self._devices, self._file_watch.problem, closing=self._closing
        )

    async def start(self) -> None:
        """Load and warm the models; raises `StartupError` if that fails."""
        self._loading = asyncio.ensure_future(self._devices.start(self._loader))
        models = await self._loading
        if models.device.read_memory is not None:
            self._metrics.watch_memory(models.read_memory)
        self._metrics.start_models(models.names)
        if models.files is not None:
            self._file_watch.start(models.files)
        await self._further.start(models)
        self._models = models

    async def close(self) -> None:
        """Refuse new requests, serve the accepted ones, and end the threads.

        Requests that are not served within SHUTDOWN_TIMEOUT are aborted. A forward that is still
        running then gets SHUTDOWN_TIMEOUT to return, or no time after `abort`.
        """
        self._closing = True
        await self._file_watch.close()
        try:
            async with asyncio.timeout(self._settings.shutdown_timeout):
                await self._requests.none_left()
        except TimeoutError:
            self.abort()
            await self._requests.none_left()
        await self._further.close()
        await self._devices.close(0 if self._aborted else self._settings.shutdown_timeout)
        self._tokenizer_threads.close()
        if self._cache is not None:
            await self._cache.close()

    def abort(self) -> None:
        """Fail every accepted request: each waiting caller gets a `DrainingError`."""
        self._closing = self._aborted = True
        error = DrainingError("the service was stopped before this was done", retry_after=5)
        self._devices.abort(error)
        self._further.abort(error)

    async def embed(
        self,
        texts: list[str],
        *,
        dense: bool | None = None,
        sparse: bool | None = None,
        colbert: bool | None = None,
        states: bool = False,
        normalize_dense: bool = False,
        embedder_only: bool = False,
        options: EmbeddingOptions = NO_OPTIONS,
        urgency: int = DEFAULT_URGENCY,
        client: str = "",
        model: str | None = None,
    ) -> EmbeddingResult:
        """Embed texts; a text's vectors depend on that text alone.

        `model` is one of MODELS; without it the default models are asked.

        A kind that is left unsaid, None, is made where the models make it.
        `states` asks for the last hidden state of every token, from the model that makes dense
        vectors. With `embedder_only` that is bge-m3 also where another model is there for them.
        `urgency` is RFC 9218's, 0 to 7; each step down doubles the request's share of the device.
        `client` names whom the request is for: places in the queue and shares of the device are
        divided among the clients that have work.
        Raises `EmptyInputError` without texts, `InvalidRequestError` where nothing is asked for or
        an option has no effect, `KindNotMadeError` for a kind that is not made, `TextTooLongError`
        where `options` forbid to cut a text, `UnavailableError` (loading, draining, unhealthy,
        queue full, out of memory), `InferenceTimeoutError` where a forward takes too long, or
        `InferenceError`.
        """
        if not texts:
            raise EmptyInputError("there are no texts to embed")
        async with self.lease(model) as loaded:
            models = replace(loaded, dense=None) if embedder_only else loaded
            outputs = wanted_kinds(
                models, dense=dense, sparse=sparse, colbert=colbert, states=states
            )
            if not outputs:
                raise InvalidRequestError("nothing is asked for: choose dense, sparse or colbert")
            return await self._embedding.run(
                models,
                texts,
                outputs,
                options=options,
                normalize_dense=normalize_dense,
                urgency=urgency,
                client=client,
            )

    @staticmethod
    def check(models: LoadedModels, outputs: Outputs, options: EmbeddingOptions) -> None:
        """Raise what `embed` would raise for any text."""
        check_options(models, outputs, options)
        find_prompt(models, outputs, options)

    async def run_tokenizer(
        self,
        call: Callable[[LoadedModels], Result],
        texts: list[str],
        *,
        client: str = "",
        model: str | None = None,
    ) -> Result:
        """What `call` makes of the models, whose tokenizers read `texts`, on one of their threads.

        `model` is as in `embed`. Raises `UnavailableError` as `embed` does, but waits for no place
        in the queue.
        """
        async with self.lease(model) as models:
            return await self._tokenizer_threads.run(partial(call, models), texts, client)

    async def rerank(self, request: RerankRequest) -> RerankResult:
        """Score each passage for its query; the scores are in the order of the passages.

        Raises `EmptyInputError` for a blank query or without passages, `InvalidRequestError` where
        there is neither one query nor one for each passage, `InferenceTimeoutError` where the
        forwards take longer than RERANK_GPU_TIMEOUT, and else as `embed`.
        """
        request.check()
        async with self.lease(request.model) as models:
            return await self._reranking.run(models, request)

    async def classify(self, request: ClassificationRequest) -> ClassificationResult:
        """The logits of each input's labels, by the reranker where that is a classifier.

        Raises `EmptyInputError` without inputs, `InvalidRequestError` where no model has labels,
        and else as `rerank`.
        """
        if not request.inputs:
            raise EmptyInputError("there are no texts to classify")
        async with self.lease(request.model) as models:
            return await self._classification.run(models, request)

    @asynccontextmanager
    async def lease(
        self, model: str | None = None, seconds: float | None = None
    ) -> AsyncIterator[LoadedModels]:
        """Accept a request, for which `close` waits; what it works with stays loaded until its end.

        It waits at most so many seconds, nine tenths of REQUEST_TIMEOUT by default, for a `model`
        of MODELS that is not loaded. Raises `UnavailableError` as `embed` does.
        """
        models = self._ready()
        with self._requests.one():
            if model is None:
                yield models
                self._further.relieve()
                return
            async with self._further.lease(model, seconds) as own:
                yield own

    def _ready(self) -> LoadedModels:
        if self._closing:
            raise DrainingError("the service is shutting down", retry_after=5)
        failure = self.failure
        if failure is not None:
            raise UnhealthyError(str(failure), retry_after=30) from failure.__cause__
        if self._models is None:
            raise LoadingError("the models are still being loaded", retry_after=5)
        return self._models

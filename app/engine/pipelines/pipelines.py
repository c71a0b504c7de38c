"""The pipelines of an engine, one for each kind of request, and what they share."""

from functools import partial

from app.engine.admission.admission import Admission
from app.engine.admission.concurrency import ConcurrencyLimit
from app.engine.admission.tokenizer_threads import TokenizerThreads
from app.engine.devices.device_pool import DevicePool
from app.engine.forwards.cached_forwards import with_cache
from app.engine.forwards.forwards import Forwards
from app.engine.forwards.vector_cache import make_cache
from app.engine.pipelines.classification import ClassificationPipeline
from app.engine.pipelines.embedding import EmbeddingPipeline
from app.engine.pipelines.reranking import RerankingPipeline
from app.engine.scheduling.job import Purpose
from app.engine.scheduling.queue import JobQueue
from app.observability.metrics import Metrics
from app.settings import Settings

ACQUIRE_TIMEOUT = 0.5


class Pipelines:
    """Embedding, reranking and classification over one queue, with the limits of the settings."""

    def __init__(
        self, settings: Settings, queue: JobQueue, devices: DevicePool, metrics: Metrics
    ) -> None:
        self._devices = devices
        threads = settings.tokenizer_threads
        self.tokenizer_threads = TokenizerThreads(None if threads == "auto" else threads)
        admission = Admission(queue, self.tokenizer_threads, metrics)
        waiting = self._limit(
            settings.max_queue_size, "embedding requests wait (MAX_QUEUE_SIZE)", Purpose.EMBEDDING
        )
        scoring = self._limit(
            settings.rerank_max_queue,
            "rerank requests are in work (RERANK_MAX_QUEUE)",
            Purpose.RERANKING,
        )
        self._cache = make_cache(settings, metrics)
        source = with_cache(Forwards(admission, waiting), self._cache, admission, metrics)
        time_limit = settings.rerank_gpu_timeout
        self.embedding = EmbeddingPipeline(admission, source)
        self.reranking = RerankingPipeline(admission, scoring, time_limit)
        self.classification = ClassificationPipeline(admission, scoring, time_limit)
        metrics.watch_queue(lambda: waiting.held)
        metrics.set_capacities(embedding=settings.max_queue_size, rerank=settings.rerank_max_queue)

    def _limit(self, capacity: int, what: str, purpose: Purpose) -> ConcurrencyLimit:
        full = f"the queue is full: {capacity} {what}"
        seconds_to_place = partial(self._devices.seconds_to_place, purpose)
        return ConcurrencyLimit(capacity, ACQUIRE_TIMEOUT, full, seconds_to_place)

    async def close(self) -> None:
        """End the tokenizer threads, and the connections of the cache."""
        self.tokenizer_threads.close()
        if self._cache is not None:
            await self._cache.close()

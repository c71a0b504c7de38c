"""The consumer: takes a batch, runs it on the device thread, hands every result to its request."""

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import structlog

from app.engine.batcher import Limits
from app.engine.queue import JobQueue
from app.errors import (
    InferenceError,
    InferenceTimeoutError,
    OutOfMemoryError,
    SmartEmbedderError,
)
from app.jobs import Batch, Job
from app.metrics import Metrics

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class ServiceRate:
    """A running mean of how fast the device works off tokens."""

    tokens_per_second: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take one forward into account."""
        now = tokens / max(seconds, 1e-9)
        last = self.tokens_per_second or now
        self.tokens_per_second = 0.8 * last + 0.2 * now


class DeviceExecutor:
    """Runs batches one after the other on one device thread until it is cancelled."""

    def __init__(
        self,
        queue: JobQueue,
        thread: Executor,
        limits: Limits,
        metrics: Metrics,
        batch_wait: float = 0.0,
    ) -> None:
        self._queue = queue
        self._thread = thread
        self._limits = limits
        self._metrics = metrics
        self._batch_wait = batch_wait
        self.rate = ServiceRate()

    async def run(self) -> None:
        """Serve the queue for ever. A batch that fails fails its own requests and no other."""
        while True:
            await self._queue.wait()
            if self._batch_wait:
                await asyncio.sleep(self._batch_wait)
            batch = self._queue.take(self._limits)
            if batch is not None:
                await self._run_batch(batch)

    async def _run_batch(self, batch: Batch) -> None:
        started = time.perf_counter()
        _mark_taken(batch, started, self._metrics)
        try:
            results = await self._on_device(batch)
        except Exception as error:  # noqa: BLE001 - these requests must hear of it
            _fail(batch, error)
            return
        seconds = time.perf_counter() - started
        self.rate.observe(batch.tokens, seconds)
        self._observe(batch, len(results), seconds)
        _deliver(batch, results, seconds)

    def _observe(self, batch: Batch, sequences: int, seconds: float) -> None:
        self._metrics.tokens.labels(batch.model.name).inc(batch.tokens)
        self._metrics.batch_tokens.observe(batch.tokens)
        if batch.outputs:
            self._metrics.batch_size.observe(sequences)
            self._metrics.embedding_inference.observe(seconds)
        else:
            self._metrics.rerank_inference.observe(seconds)

    async def _on_device(self, batch: Batch) -> list[Any]:
        running = asyncio.get_running_loop().run_in_executor(self._thread, batch.run)
        await _release_overdue(batch, running)
        return await running


async def _release_overdue(batch: Batch, running: "asyncio.Future[list[Any]]") -> None:
    """Wait for the forward; a caller whose time limit passes meanwhile is told so at once.

    The forward itself cannot be stopped: it keeps the device until it returns.
    """
    began = time.perf_counter()
    limited = [share.job for share in batch.shares if share.job.time_limit is not None]
    for job in sorted(limited, key=_time_left):
        left = began + _time_left(job) - time.perf_counter()
        await asyncio.wait({running}, timeout=max(0.0, left))
        if running.done():
            return
        if not job.future.done():
            job.future.set_exception(
                InferenceTimeoutError(f"the forwards took longer than {job.time_limit:g} seconds")
            )


def _time_left(job: Job) -> float:
    return (job.time_limit or 0.0) - job.inference_seconds


def _mark_taken(batch: Batch, now: float, metrics: Metrics) -> None:
    for share in batch.shares:
        if share.job.first_taken_at is None:
            share.job.first_taken_at = now
            metrics.queue_wait.observe(now - share.job.enqueued_at)


def _deliver(batch: Batch, results: list[Any], seconds: float) -> None:
    begin = 0
    for share in batch.shares:
        job, count = share.job, share.stop - share.start
        job.results[share.start : share.stop] = results[begin : begin + count]
        job.finished += count
        job.inference_seconds += seconds
        begin += count
        if job.finished == len(job.sequences) and not job.future.done():
            job.future.set_result(job.results)


def _fail(batch: Batch, error: Exception) -> None:
    if not isinstance(error, SmartEmbedderError):
        log.error("batch_failed", model=batch.model.name, tokens=batch.tokens, exc_info=error)
    for share in batch.shares:
        if not share.job.future.done():
            share.job.future.set_exception(_as_domain_error(error))


def _as_domain_error(error: Exception) -> SmartEmbedderError:
    if isinstance(error, SmartEmbedderError):
        return type(error)(str(error))
    # torch.OutOfMemoryError, told by its name: the engine does not import torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        wrapped: SmartEmbedderError = OutOfMemoryError("the device has too little memory for this")
    else:
        wrapped = InferenceError("the model failed on this request")
    wrapped.__cause__ = error
    return wrapped

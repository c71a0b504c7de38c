"""The consumer: takes a batch, runs it on the device thread, hands every result to its request."""

import asyncio
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import structlog

from app.engine.budget import TokenBudget
from app.engine.device_thread import DeviceThread
from app.engine.forward_limit import ForwardLimit, Watch
from app.engine.queue import JobQueue
from app.engine.service_rate import ServiceRate
from app.errors import (
    InferenceError,
    InferenceTimeoutError,
    OutOfMemoryError,
    SmartEmbedderError,
)
from app.jobs import Batch, Job, Model
from app.metrics import Metrics

log = structlog.get_logger(__name__)

_MEMORY_RETRY_AFTER = 30
# What PyTorch's allocators and libraries say in a plain RuntimeError.
_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


class DeviceExecutor:
    """Runs batches one after the other on one device thread until it is cancelled."""

    def __init__(
        self,
        queue: JobQueue,
        thread: DeviceThread,
        budget: TokenBudget,
        limit: ForwardLimit,
        metrics: Metrics,
        *,
        free_memory: Callable[[], object],
        stand_ins: Mapping[Model, Model] = MappingProxyType({}),
        batch_wait: float = 0.0,
    ) -> None:
        self._queue = queue
        self._thread = thread
        self._budget = budget
        self._limit = limit
        self._metrics = metrics
        self._free_memory = free_memory
        self._stand_ins = stand_ins
        self._batch_wait = batch_wait
        self._running: Batch | None = None
        self._watch = Watch()
        self.rate = ServiceRate()

    @property
    def stuck_seconds(self) -> float:
        """How long the device thread has been away if it may never come back, else 0."""
        return self._watch.stuck_seconds

    async def run(self) -> None:
        """Serve the queue for ever. A batch that fails fails its own requests and no other."""
        try:
            while True:
                await self._serve_once()
        except Exception:
            log.exception("consumer_ended")
            raise

    async def _serve_once(self) -> None:
        await self._queue.wait()
        if self._batch_wait:
            await asyncio.sleep(self._batch_wait)
        batch = self._queue.take(self._budget.limits)
        if batch is not None:
            _mark_taken(batch, time.perf_counter(), self._metrics)
            await self._run_batch(batch)

    def abort(self, error: SmartEmbedderError) -> None:
        """Fail every job that waits or is on the device; the thread is left to itself."""
        for job in self._queue.close():
            _fail_job(job, error)
        if self._running is not None:
            _fail(self._running, error)

    async def _run_batch(self, batch: Batch) -> None:
        started = time.perf_counter()
        try:
            results = await self._on_device(batch)
        except OutOfMemoryError as error:
            await self._run_in_halves(batch, error)
        except Exception as error:  # noqa: BLE001 - these requests must hear of it
            _fail(batch, error)
        else:
            seconds = time.perf_counter() - started
            self.rate.observe(batch.tokens, seconds)
            self._budget.recover()
            self._observe(batch, len(results), seconds)
            _deliver(batch, results, seconds)

    async def _run_in_halves(self, batch: Batch, error: OutOfMemoryError) -> None:
        """Try each half by itself; a single sequence that does not fit is its request's failure."""
        halves = batch.halves()
        if not halves[0].shares:
            _fail(batch, error)
            return
        self._metrics.splits.inc()
        self._budget.shrink(batch.tokens)
        limits = self._budget.limits
        log.warning("out_of_memory", tokens=batch.tokens, max_batch_tokens=limits.max_tokens)
        for half in halves:
            waited_for = half.without_departed()
            if waited_for.shares:
                await self._run_batch(waited_for)

    def _observe(self, batch: Batch, sequences: int, seconds: float) -> None:
        self._metrics.tokens.labels(batch.model.name).inc(batch.tokens)
        self._metrics.batch_tokens.observe(batch.tokens)
        if batch.outputs:
            self._metrics.batch_size.observe(sequences)
            self._metrics.embedding_inference.observe(seconds)
        else:
            self._metrics.rerank_inference.observe(seconds)

    async def _on_device(self, batch: Batch) -> list[Any]:
        running = asyncio.ensure_future(self._thread.run(lambda: self._forward(batch)))
        limits = [self._limit.of_job(share.job, batch) for share in batch.shares]
        self._running = batch
        self._watch.begin(self._limit.of_device(batch))
        try:
            await _release_overdue(batch, limits, running)
            return await running
        finally:
            self._watch.end()
            self._running = None

    def _forward(self, batch: Batch) -> list[Any]:
        """Run the batch, in the device thread; raise `OutOfMemoryError` with the memory freed."""
        try:
            return batch.run(self._stand_ins.get(batch.model, batch.model))
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
        # Outside the handler, where the error no longer keeps the failed forward's tensors.
        self._free_memory()
        raise OutOfMemoryError(
            "the device has too little memory for this", retry_after=_MEMORY_RETRY_AFTER
        )


async def _release_overdue(
    batch: Batch, limits: list[float], running: "asyncio.Future[list[Any]]"
) -> None:
    """Wait for the forward; a caller whose time limit passes meanwhile is told so at once.

    The forward itself cannot be stopped: it keeps the device until it returns.
    """
    began = time.perf_counter()
    order = sorted(range(len(limits)), key=limits.__getitem__)
    for place in order:
        left = began + limits[place] - time.perf_counter()
        await asyncio.wait({running}, timeout=max(0.0, left))
        if running.done():
            return
        job = batch.shares[place].job
        seconds = limits[place] if job.time_limit is None else job.time_limit
        what = "forward" if job.time_limit is None else "forwards"
        _fail_job(job, InferenceTimeoutError(f"the {what} took longer than {seconds:g} seconds"))


def _mark_taken(batch: Batch, now: float, metrics: Metrics) -> None:
    for share in batch.shares:
        if share.job.first_taken_at is None:
            share.job.first_taken_at = now
            metrics.queue_wait.observe(now - share.job.enqueued_at)


def _deliver(batch: Batch, results: list[Any], seconds: float) -> None:
    begin, now = 0, time.perf_counter()
    for share in batch.shares:
        job, count = share.job, share.stop - share.start
        job.results[share.start : share.stop] = results[begin : begin + count]
        job.finished += count
        job.inference_seconds += seconds
        job.last_back_at = now
        begin += count
        if job.finished == len(job.sequences) and not job.future.done():
            job.future.set_result(job.results)


def _fail(batch: Batch, error: Exception) -> None:
    if not isinstance(error, SmartEmbedderError):
        log.error("batch_failed", model=batch.model.name, tokens=batch.tokens, exc_info=error)
    for share in batch.shares:
        _fail_job(share.job, error)


def _fail_job(job: Job, error: Exception) -> None:
    if not job.future.done():
        job.future.set_exception(_as_domain_error(error))


def _as_domain_error(error: Exception) -> SmartEmbedderError:
    """An error of its own for each job: a shared one would gather everybody's tracebacks."""
    if isinstance(error, SmartEmbedderError):
        return type(error)(str(error), retry_after=error.retry_after)
    wrapped = InferenceError("the model failed on this request")
    wrapped.__cause__ = error
    return wrapped


def _is_out_of_memory(error: Exception) -> bool:
    """Told by name and words: the engine does not import torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(w in str(error) for w in _MEMORY_MESSAGES)

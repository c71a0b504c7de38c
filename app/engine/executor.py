"""The consumer: takes a batch, has it computed on the device, hands every result to its job."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import structlog

from app.engine.batch import Batch
from app.engine.device_guard import DeviceGuard
from app.engine.device_threads import DeviceThreads
from app.engine.forward_limit import BatchLimits, DeviceWatchdog, ForwardLimit
from app.engine.job import Purpose
from app.engine.memory import TokenBudget
from app.engine.model import Model
from app.engine.queue import JobQueue
from app.errors import (
    DeviceFailedError,
    InferenceTimeoutError,
    OutOfMemoryError,
    SmartEmbedderError,
    UnhealthyError,
)
from app.observability.metrics import Metrics

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A batch between the queue and its jobs; `previous_done` is when the one before is back."""

    batch: Batch
    previous_done: asyncio.Event
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)


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
    """Runs batches one after the other on one device until it is cancelled or the device fails.

    `on_stuck` is called when the device has been away for so long that it may never come back,
    `on_failed` with the error after which `failed` is true and no batch is taken any more.
    """

    def __init__(
        self,
        queue: JobQueue,
        threads: DeviceThreads,
        budget: TokenBudget,
        limit: ForwardLimit,
        metrics: Metrics,
        *,
        guard: DeviceGuard,
        replicas: Mapping[Model, Model] = MappingProxyType({}),
        batch_wait: float = 0.0,
        on_stuck: Callable[[], None] = lambda: None,
        on_failed: Callable[[DeviceFailedError], None] = lambda _: None,
    ) -> None:
        self._queue = queue
        self._threads = threads
        self._budget = budget
        self._limit = limit
        self._metrics = metrics
        self._guard = guard
        self._replicas = replicas
        self._batch_wait = batch_wait
        self._slots = asyncio.Semaphore(threads.most_batches)
        self._in_flight: set[_InFlight] = set()
        self._last_done = asyncio.Event()
        self._last_done.set()
        self._free_since = 0.0
        self._watchdog = DeviceWatchdog(on_stuck)
        self._on_failed = on_failed
        self.rate = ServiceRate()
        self.failed = False

    @property
    def stuck_seconds(self) -> float:
        """How long the device thread has been away if it may never come back, else 0."""
        return self._watchdog.stuck_seconds

    async def run(self) -> None:
        """Serve the queue. A batch that fails fails its own requests and no other."""
        async with asyncio.TaskGroup() as tasks:
            while not self.failed:
                await self._serve_once(tasks)

    async def _serve_once(self, tasks: asyncio.TaskGroup) -> None:
        await self._queue.wait()
        if self._batch_wait:
            await asyncio.sleep(self._batch_wait)
        await self._slots.acquire()
        # As late as can be: whoever comes meanwhile may be in it.
        batch = None if self.failed else self._queue.take(self._budget.limits)
        if batch is None:
            self._slots.release()
            return
        self._observe_wait(batch)
        in_flight = _InFlight(batch, previous_done=self._last_done)
        self._last_done = in_flight.done
        self._in_flight.add(in_flight)
        tasks.create_task(self._execute(in_flight))
        await in_flight.launched.wait()

    def abort(self, error: SmartEmbedderError) -> None:
        """Fail every job that is on the device; the thread is left to itself."""
        for in_flight in self._in_flight:
            in_flight.batch.fail(error)

    async def _execute(self, in_flight: _InFlight) -> None:
        ended = True
        try:
            await self._run_batch(in_flight.batch, in_flight)
            ended = False
        finally:
            if ended:  # The consumer ends here, and these callers would wait for ever.
                in_flight.batch.fail(consumer_ended())
            self._in_flight.discard(in_flight)
            in_flight.launched.set()
            in_flight.done.set()
            self._slots.release()

    async def _run_batch(self, batch: Batch, in_flight: _InFlight) -> None:
        started = time.perf_counter()
        on_device = self._on_device(batch, in_flight)
        # As a value: whatever it is, the callers of this batch must hear of it.
        outcome: list[Any] | BaseException
        (outcome,) = await asyncio.gather(on_device, return_exceptions=True)
        if isinstance(outcome, OutOfMemoryError):
            # The batch before it has given its memory back by then.
            await in_flight.previous_done.wait()
            await self._run_in_halves(batch, outcome, in_flight)
        elif isinstance(outcome, DeviceFailedError):
            batch.fail(outcome)
            self._take_out_of_service(outcome)
        elif isinstance(outcome, Exception):
            _fail(batch, outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            self._complete(batch, outcome, self._device_seconds(started))

    def _take_out_of_service(self, error: DeviceFailedError) -> None:
        if not self.failed:
            self.failed = True
            self.rate = ServiceRate()
            self._on_failed(error)

    def _complete(self, batch: Batch, results: list[Any], seconds: float) -> None:
        self.rate.observe(batch.tokens, seconds)
        self._budget.recover()
        self._observe(batch, seconds)
        batch.complete(results, seconds)

    def _device_seconds(self, started: float) -> float:
        """How long the device was at this batch: not while it still was at the one before."""
        now = time.perf_counter()
        seconds, self._free_since = now - max(started, self._free_since), now
        return seconds

    async def _run_in_halves(
        self, batch: Batch, error: OutOfMemoryError, in_flight: _InFlight
    ) -> None:
        """Try each half by itself; a single sequence that does not fit is its request's failure."""
        halves = batch.halves()
        if not halves[0].slices:
            batch.fail(error)
            return
        self._metrics.splits.inc()
        self._budget.shrink(batch.tokens)
        limits = self._budget.limits
        log.warning("out_of_memory", tokens=batch.tokens, max_batch_tokens=limits.max_tokens)
        for half in halves:
            unresolved = half.unresolved()
            if unresolved.slices:
                await self._run_batch(unresolved, in_flight)

    def _observe_wait(self, batch: Batch) -> None:
        """Once for each job, when its first sequences are taken."""
        for part in batch.slices:
            taken_at = part.job.first_taken_at
            if part.start == 0 and taken_at is not None:
                self._metrics.queue_wait.observe(taken_at - part.job.enqueued_at)

    def _observe(self, batch: Batch, seconds: float) -> None:
        self._metrics.tokens.labels(batch.model.name).inc(batch.tokens)
        self._metrics.batch_tokens.observe(batch.tokens)
        embedded = batch.count(Purpose.EMBEDDING)
        if embedded:
            self._metrics.batch_size.observe(embedded)
            self._metrics.embedding_inference.observe(seconds)
        if batch.count(Purpose.RERANKING):
            self._metrics.rerank_inference.observe(seconds)

    async def _on_device(self, batch: Batch, in_flight: _InFlight) -> list[Any]:
        limits = self._limit.split(batch)
        with self._watchdog.over(limits.device):
            running = asyncio.ensure_future(self._compute(batch, in_flight))
            try:
                # The limits are for this forward and not for the one before.
                await in_flight.previous_done.wait()
                await _fail_overdue(batch, limits, running)
                return await running
            finally:
                running.cancel()

    async def _compute(self, batch: Batch, in_flight: _InFlight) -> list[Any]:
        model = self._replicas.get(batch.model, batch.model)

        def launch() -> Callable[[], list[Any]]:
            collect = self._guard.guard(lambda: batch.launch(model))
            return lambda: self._guard.guard(collect)

        return await self._threads.compute(launch, in_flight.launched)


def consumer_ended() -> UnhealthyError:
    """What everyone is told who waits for a consumer that has ended by a fault of its own."""
    message = "the queue's consumer has ended; its log line says why"
    return UnhealthyError(message, retry_after=30)


def _fail(batch: Batch, error: Exception) -> None:
    """Tell every job of the batch; an error that is not ours is logged."""
    if not isinstance(error, SmartEmbedderError):
        log.error("batch_failed", model=batch.model.name, tokens=batch.tokens, exc_info=error)
    batch.fail(error)


async def _fail_overdue(
    batch: Batch, limits: BatchLimits, running: "asyncio.Future[list[Any]]"
) -> None:
    """Wait for the forward; a caller whose time limit passes meanwhile is told so at once.

    The forward itself cannot be stopped: it keeps the device until it returns.
    """
    began = time.perf_counter()
    order = sorted(range(len(batch.slices)), key=limits.slices.__getitem__)
    for place in order:
        left = began + limits.slices[place] - time.perf_counter()
        await asyncio.wait({running}, timeout=max(0.0, left))
        if running.done():
            return
        job = batch.slices[place].job
        seconds = limits.slices[place] if job.time_limit is None else job.time_limit
        of_request = job.time_limit is not None
        what, setting = ("forwards", "RERANK_GPU") if of_request else ("forward", "GPU_PROCESS")
        job.fail(
            InferenceTimeoutError(
                f"the {what} took longer than {seconds:g} seconds ({setting}_TIMEOUT)"
            )
        )

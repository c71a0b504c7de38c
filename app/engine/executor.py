"""The consumer: takes a batch, has it computed on the device, hands every result to its request."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import structlog

from app.engine.budget import TokenBudget
from app.engine.delivery import deliver, fail, fail_job
from app.engine.device_threads import DeviceThreads
from app.engine.forward_limit import ForwardLimit, Watch
from app.engine.memory import MemoryGuard
from app.engine.queue import JobQueue
from app.engine.service_rate import ServiceRate
from app.errors import InferenceTimeoutError, OutOfMemoryError, SmartEmbedderError
from app.jobs import Batch, Model
from app.metrics import Metrics

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A batch between the queue and its requests; `after` is when the one before has landed."""

    batch: Batch
    after: asyncio.Event
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    landed: asyncio.Event = field(default_factory=asyncio.Event)


class DeviceExecutor:
    """Runs batches one after the other on one device until it is cancelled."""

    def __init__(
        self,
        queue: JobQueue,
        threads: DeviceThreads,
        budget: TokenBudget,
        limit: ForwardLimit,
        metrics: Metrics,
        *,
        memory: MemoryGuard,
        stand_ins: Mapping[Model, Model] = MappingProxyType({}),
        batch_wait: float = 0.0,
    ) -> None:
        self._queue = queue
        self._threads = threads
        self._budget = budget
        self._limit = limit
        self._metrics = metrics
        self._memory = memory
        self._stand_ins = stand_ins
        self._batch_wait = batch_wait
        self._slots = asyncio.Semaphore(threads.most_batches)
        self._flights: set[_Flight] = set()
        self._last_landed = asyncio.Event()
        self._last_landed.set()
        self._free_since = 0.0
        self._watch = Watch()
        self.rate = ServiceRate()

    @property
    def stuck_seconds(self) -> float:
        """How long the device thread has been away if it may never come back, else 0."""
        return self._watch.stuck_seconds

    async def run(self) -> None:
        """Serve the queue for ever. A batch that fails fails its own requests and no other."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._serve_once(tasks)
        except Exception:
            log.exception("consumer_ended")
            raise

    async def _serve_once(self, tasks: asyncio.TaskGroup) -> None:
        await self._queue.wait()
        if self._batch_wait:
            await asyncio.sleep(self._batch_wait)
        await self._slots.acquire()
        # As late as can be: whoever comes meanwhile may be in it.
        batch = self._queue.take(self._budget.limits)
        if batch is None:
            self._slots.release()
            return
        _mark_taken(batch, time.perf_counter(), self._metrics)
        flight = _Flight(batch, after=self._last_landed)
        self._last_landed = flight.landed
        tasks.create_task(self._fly(flight))
        await flight.launched.wait()

    def abort(self, error: SmartEmbedderError) -> None:
        """Fail every job that waits or is on the device; the thread is left to itself."""
        for job in self._queue.close():
            fail_job(job, error)
        for flight in self._flights:
            fail(flight.batch, error)

    async def _fly(self, flight: _Flight) -> None:
        self._flights.add(flight)
        try:
            await self._run_batch(flight.batch, flight)
        finally:
            self._flights.discard(flight)
            flight.launched.set()
            flight.landed.set()
            self._slots.release()

    async def _run_batch(self, batch: Batch, flight: _Flight) -> None:
        started = time.perf_counter()
        try:
            results = await self._on_device(batch, flight)
        except OutOfMemoryError as error:
            # What was on the device beside it has given its memory back then.
            await flight.after.wait()
            await self._run_in_halves(batch, error, flight)
        except Exception as error:  # noqa: BLE001 - these requests must hear of it
            fail(batch, error)
        else:
            seconds = self._device_seconds(started)
            self.rate.observe(batch.tokens, seconds)
            self._budget.recover()
            self._observe(batch, len(results), seconds)
            deliver(batch, results, seconds)

    def _device_seconds(self, started: float) -> float:
        """How long the device was at this batch: not while it still was at the one before."""
        now = time.perf_counter()
        seconds, self._free_since = now - max(started, self._free_since), now
        return seconds

    async def _run_in_halves(self, batch: Batch, error: OutOfMemoryError, flight: _Flight) -> None:
        """Try each half by itself; a single sequence that does not fit is its request's failure."""
        halves = batch.halves()
        if not halves[0].shares:
            fail(batch, error)
            return
        self._metrics.splits.inc()
        self._budget.shrink(batch.tokens)
        limits = self._budget.limits
        log.warning("out_of_memory", tokens=batch.tokens, max_batch_tokens=limits.max_tokens)
        for half in halves:
            waited_for = half.without_departed()
            if waited_for.shares:
                await self._run_batch(waited_for, flight)

    def _observe(self, batch: Batch, sequences: int, seconds: float) -> None:
        self._metrics.tokens.labels(batch.model.name).inc(batch.tokens)
        self._metrics.batch_tokens.observe(batch.tokens)
        if batch.outputs:
            self._metrics.batch_size.observe(sequences)
            self._metrics.embedding_inference.observe(seconds)
        else:
            self._metrics.rerank_inference.observe(seconds)

    async def _on_device(self, batch: Batch, flight: _Flight) -> list[Any]:
        limits = [self._limit.of_job(share.job, batch) for share in batch.shares]
        with self._watch.over(self._limit.of_device(batch)):
            running = asyncio.ensure_future(self._compute(batch, flight))
            try:
                # The limits are for this forward and not for the one before.
                await flight.after.wait()
                await _release_overdue(batch, limits, running)
                return await running
            finally:
                running.cancel()

    async def _compute(self, batch: Batch, flight: _Flight) -> list[Any]:
        model = self._stand_ins.get(batch.model, batch.model)

        def launch() -> Callable[[], list[Any]]:
            collect = self._memory.guard(lambda: batch.launch(model))
            return lambda: self._memory.guard(collect)

        return await self._threads.compute(launch, flight.launched)


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
        fail_job(job, InferenceTimeoutError(f"the {what} took longer than {seconds:g} seconds"))


def _mark_taken(batch: Batch, now: float, metrics: Metrics) -> None:
    for share in batch.shares:
        if share.job.first_taken_at is None:
            share.job.first_taken_at = now
            metrics.queue_wait.observe(now - share.job.enqueued_at)

"""The consumer of a device: takes batches from the queue, runs them, and completes their jobs."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import structlog

from smart_embedder import errors
from smart_embedder.engine.devices import limits
from smart_embedder.engine.devices.thread import DeviceThread, guarded
from smart_embedder.engine.model import Model
from smart_embedder.engine.scheduling.batcher import Batch, Limits
from smart_embedder.engine.scheduling.job import Job, Purpose
from smart_embedder.engine.scheduling.queue import (
    WORTH_PREEMPTING,
    JobQueue,
    Preemption,
    split_short,
)
from smart_embedder.observability.metrics import Metrics

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class InFlight:
    """A batch that was taken from the queue and is not completed yet.

    `device_free` is set when the batch before it is completed. `began` is when the device began it
    (0 before it is launched), or the last half of it after memory ran out, and `first_began` when
    it was launched as a whole. `preempted_seconds` is how long batches that preempted it had the
    device since `began`. `expected_seconds` are those of its forward.

    `forward` is what is computed of it: all, or a half after memory ran out, without the requests
    that have their outcome by its beginning, when `begun` is set. `returned` is set once the device
    has computed that, and `before` is the same of the forward launched before it.
    """

    batch: Batch
    device_free: asyncio.Event
    preempts: "InFlight | None" = None
    expected_seconds: float = 0.0
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = 0.0
    first_began: float = 0.0
    preempted_seconds: float = 0.0
    forward: Batch = field(init=False)
    begun: asyncio.Event = field(init=False)
    returned: asyncio.Event = field(init=False)
    before: asyncio.Event | None = field(init=False)

    @property
    def seconds_left(self) -> float:
        """Seconds until the device has computed it, about."""
        if not self.began:
            return self.expected_seconds
        elapsed = time.perf_counter() - self.began
        # A forward that takes longer than expected is expected to take half as long again.
        return self.expected_seconds - elapsed if elapsed < self.expected_seconds else elapsed / 2

    def begin(self) -> None:
        """Note that the device begins it, or the next half of it."""
        self.began, self.preempted_seconds = time.perf_counter(), 0.0
        self.first_began = self.first_began or self.began


class DeviceExecutor:
    """Runs batches one after the other on one device until it is cancelled or the device fails.

    A GPU has two threads, so that the next batch is launched while the last one is computed:
    `launching` launches forwards, and `collecting` waits for their results. A CPU computes in
    `launching`, where a call may run within another, and has no `collecting`.

    `models` has those that it computes, by the model of a job. `on_stuck` is called when a forward
    has taken so long that it may never return. `on_failed` is called as an error takes the device
    out of service; `has_others` says whether another device runs a model, which then gets the
    batches of this one.
    """

    def __init__(
        self,
        name: str,
        queue: JobQueue,
        launching: DeviceThread,
        collecting: DeviceThread | None,
        *,
        limit: limits.ForwardLimit,
        metrics: Metrics,
        free_memory: Callable[[], object],
        models: dict[Model, limits.Served],
        batch_wait: float,
        on_stuck: Callable[[], None],
        on_failed: Callable[[], None],
        has_others: Callable[[Model], bool],
    ) -> None:
        self.name = name
        self.launching = launching
        self.free_memory = free_memory
        self.limit = limit
        self.models = models
        self.watchdog = limits.DeviceWatchdog(on_stuck)
        self.rate = limits.ServiceRate()
        self.failed = False
        self.most_batches = 1 if collecting is None else 2
        self._consumer = queue.consumer(self.serves)
        self._collecting = collecting
        self._metrics = metrics
        self._batch_wait = batch_wait
        self._on_stuck = on_stuck
        self._on_failed = on_failed
        self._has_others = has_others
        self._slots = asyncio.Semaphore(self.most_batches)
        self._in_flight: set[InFlight] = set()
        self._last_done = asyncio.Event()
        self._last_done.set()
        self._last_returned: asyncio.Event | None = None
        self._preemption: Preemption | None = None

    @property
    def tokens_per_second(self) -> float:
        """The measured rate; before the first forward that of the start, 0 if there is none."""
        at_start = next((each.seconds_per_token for each in self.models.values()), 0.0)
        return self.rate.tokens_per_second or (1 / at_start if at_start else 0.0)

    @property
    def batches(self) -> list[Batch]:
        """The batches on the device."""
        return [each.batch for each in self._in_flight]

    @property
    def seconds_left(self) -> float:
        """Seconds until it can take another batch, about."""
        running = [each for each in self._in_flight if each.preempts is None]
        if len(running) < self.most_batches:
            return 0.0
        first = min(running, key=lambda each: each.began or math.inf)
        return first.seconds_left

    def serves(self, model: Model) -> bool:
        """Whether the device computes this model."""
        return not self.failed and model in self.models

    async def run(self) -> None:
        """Serve the queue. A batch that fails fails its own requests and no other."""
        async with asyncio.TaskGroup() as tasks:
            self._consumer.on_arrival = self._offer
            try:
                while not self.failed:
                    await self._serve_once(tasks)
            finally:
                self._consumer.on_arrival = None

    async def _serve_once(self, tasks: asyncio.TaskGroup) -> None:
        await self._consumer.wait()
        if self._batch_wait:
            await asyncio.sleep(self._batch_wait)
        await self._slots.acquire()
        # As late as possible, so that the batch can hold jobs that arrived meanwhile.
        queue = self._consumer.queue
        batch = None if self.failed else queue.take(self._limits_of, self.serves)
        if batch is None:
            self._slots.release()
            return
        served = self.models[batch.model]
        if served.rate.tokens_per_second:
            seconds = batch.tokens / served.rate.tokens_per_second
        else:
            seconds = limits.predicted_seconds(batch, served.seconds_per_token)
        in_flight = InFlight(batch, device_free=self._last_done, expected_seconds=seconds)
        self._last_done = in_flight.done
        if batch.handed_over:
            # It has failed another device, and may fail this one: it runs beside no other.
            self._in_flight.add(in_flight)
            await in_flight.device_free.wait()
            self._start(tasks, in_flight)
            await in_flight.done.wait()
            return
        if self._collecting is None and seconds > WORTH_PREEMPTING:
            self._let_short_jobs_preempt(in_flight, tasks)
        self._start(tasks, in_flight)
        await in_flight.launched.wait()

    def _limits_of(self, model: Model) -> Limits:
        return self.models[model].budget.limits

    def _start(self, tasks: asyncio.TaskGroup, in_flight: InFlight) -> None:
        for each in in_flight.batch.slices:
            taken_at, is_first = each.job.first_taken_at, each.start == 0
            if taken_at is not None and is_first and not in_flight.batch.handed_over:
                self._metrics.queue_wait.observe(taken_at - each.job.enqueued_at)
        self._in_flight.add(in_flight)
        tasks.create_task(self._execute(in_flight))

    def _let_short_jobs_preempt(self, in_flight: InFlight, tasks: asyncio.TaskGroup) -> None:
        """Let short jobs run between the layers of this forward, first those of its own batch."""

        def start(batch: Batch) -> None:
            self._start(tasks, InFlight(batch, in_flight.device_free, preempts=in_flight))

        short, in_flight.batch = split_short(in_flight.batch)
        self._preemption = Preemption(
            in_flight.batch, in_flight.expected_seconds, self._consumer, self._limits_of, start
        )
        if short.slices:
            self._preemption.begin(short)

    def _offer(self, job: Job) -> None:
        """Let a job that has just arrived preempt the running forward, if it is short.

        If that may never return, the job must not wait for it.
        """
        if self.watchdog.stuck_seconds:
            self._on_stuck()
        elif self._preemption is not None:
            self._preemption.offer([job])

    async def close(self, seconds: float) -> None:
        """End its threads; a running forward gets `seconds` to return."""
        threads = (self.launching, self._collecting)
        await asyncio.gather(*(each.close(seconds) for each in threads if each is not None))

    async def _execute(self, in_flight: InFlight) -> None:
        try:
            await self._run_batch(in_flight, in_flight.batch)
        except BaseException:  # It ends the consumer: its callers must not wait for ever.
            in_flight.batch.fail(consumer_ended())
            raise
        finally:
            self._in_flight.discard(in_flight)
            in_flight.launched.set()
            in_flight.done.set()
            # Let the next batch begin, or the next batch that preempts.
            preempted, preemption = in_flight.preempts, self._preemption
            if preempted is None:
                self._preemption = None
                self._slots.release()
            elif preemption is not None and preemption.batch is preempted.batch:
                first = in_flight.first_began
                preemption.ended(time.perf_counter() - first if first else 0.0)

    async def _run_batch(self, in_flight: InFlight, batch: Batch) -> None:
        """Run it, or a half of it."""
        in_flight.forward, in_flight.before, out_of_memory = batch, None, None
        in_flight.begun, in_flight.returned = asyncio.Event(), asyncio.Event()
        try:
            results = await self._compute(in_flight)
        except errors.OutOfMemoryError as error:
            out_of_memory = error
        except errors.DeviceFailedError as error:
            self._take_out_of_service(in_flight.forward, error)
        except _NotLaunchedError:
            if self.failed:
                message = "a device has failed before it computed this"
                self._hand_over(
                    in_flight.forward, errors.DeviceFailedError(message, retry_after=30)
                )
        except Exception as error:
            if not isinstance(error, errors.SmartEmbedderError):
                tokens = in_flight.forward.tokens
                log.exception("batch_failed", model=batch.model.name, tokens=tokens)
            in_flight.forward.fail(error)
        else:
            self._complete(in_flight, results)
        if out_of_memory is not None:
            # By then the batch before it has returned its memory.
            await in_flight.device_free.wait()
            await self._run_in_halves(in_flight, out_of_memory)

    def _take_out_of_service(self, batch: Batch, error: errors.DeviceFailedError) -> None:
        """Take no more batches; hand `batch` to another device, unless it may be the cause."""
        was_serving, self.failed = not self.failed, True
        if batch.handed_over or isinstance(error, errors.DeviceCrashedError):
            batch.fail(error)
        else:
            self._hand_over(replace(batch, handed_over=True), error)
        if was_serving:
            self.rate = limits.ServiceRate()
            log.error("device_failed", device=self.name, exc_info=error)
            self._on_failed()

    def _hand_over(self, batch: Batch, error: errors.DeviceFailedError) -> None:
        """Give a batch to another device; it fails with `error` if none has its model."""
        if not self._has_others(batch.model):
            batch.fail(error)
            return
        log.warning("batch_handed_over", model=batch.model.name, tokens=batch.tokens)
        self._consumer.queue.hand_over(batch)

    def _complete(self, in_flight: InFlight, results: list[Any]) -> None:
        batch = in_flight.forward
        # Seconds that the device worked on this batch alone.
        seconds, preempted = time.perf_counter() - in_flight.began, in_flight.preempts
        if preempted is None:
            seconds -= in_flight.preempted_seconds
            # Those that preempt are small, and say little of the device's rate.
            self.rate.observe(batch.tokens, seconds)
            self.models[batch.model].rate.observe(batch.tokens, seconds)
        elif in_flight.began > preempted.began > 0:
            preempted.preempted_seconds += seconds
        self.models[batch.model].budget.recover()
        metrics, counts = self._metrics, Counter[Purpose]()
        for each in batch.slices:
            counts[each.job.purpose] += each.count
        metrics.tokens.labels(batch.model.name).inc(batch.tokens)
        metrics.batch_tokens.observe(batch.tokens)
        if counts[Purpose.EMBEDDING]:
            metrics.batch_size.observe(counts[Purpose.EMBEDDING])
            metrics.embedding_inference.observe(seconds)
        if counts[Purpose.RERANKING]:
            metrics.rerank_inference.observe(seconds)
        batch.complete(results, seconds)

    async def _run_in_halves(self, in_flight: InFlight, error: errors.OutOfMemoryError) -> None:
        """Run each half by itself; a single sequence that does not fit fails its request."""
        batch = in_flight.forward
        halves = batch.halves()
        if not halves[0].slices:
            batch.fail(error)
            return
        self._metrics.splits.inc()
        budget = self.models[batch.model].budget
        budget.shrink(batch.tokens)
        left = budget.limits.max_tokens
        log.warning("out_of_memory", tokens=batch.tokens, max_batch_tokens=left)
        for half in halves:
            await self._run_batch(in_flight, half)

    async def _compute(self, in_flight: InFlight) -> list[Any]:
        """The results of a forward, which may be above the time limits of its jobs."""
        per_token = self.models[in_flight.batch.model].seconds_per_token
        with self.watchdog.over(self.limit.of_device(in_flight.forward, per_token)):
            running = asyncio.ensure_future(self._on_device(in_flight))
            try:
                # The limits include neither the wait for the thread nor the forward before this
                # one, which may be of the batch after it if this is a half.
                await in_flight.begun.wait()
                if in_flight.before is not None and not in_flight.before.is_set():
                    await in_flight.before.wait()
                    in_flight.begin()
                batch = in_flight.forward
                await limits.fail_overdue(batch, self.limit.of_batch(batch, per_token), running)
                return await running
            finally:
                running.cancel()
                in_flight.returned.set()

    async def _on_device(self, in_flight: InFlight) -> list[Any]:
        model = self.models[in_flight.batch.model].runs
        preempts = in_flight.preempts is not None
        loop = asyncio.get_running_loop()

        def launch() -> Any:
            """Look at the latest moment for whom to compute, and on what: it may have waited.

            Returns the results, or with a second thread what collects them there.
            """
            batch = in_flight.forward.unresolved()
            if self.failed or not batch.slices:
                raise _NotLaunchedError
            in_flight.forward = batch
            if not preempts:
                in_flight.before, self._last_returned = self._last_returned, in_flight.returned
            in_flight.begin()
            loop.call_soon_threadsafe(in_flight.begun.set)
            collect = batch.launch(model)
            return collect() if self._collecting is None else collect

        try:
            guarded_launch = partial(guarded, launch, self.free_memory)
            launched = await self.launching.run(guarded_launch, preempts=preempts)
            if self._collecting is not None:
                in_flight.launched.set()
                collect = partial(guarded, launched, self.free_memory)
                launched = await self._collecting.run(collect)
            results: list[Any] = launched
            return results
        finally:  # The thread may have ended before this began.
            in_flight.begun.set()


class _NotLaunchedError(Exception):
    """When it was its turn the device had failed, or nobody waited for it any longer."""


def consumer_ended() -> errors.UnhealthyError:
    """The error of requests whose consumer has ended by an unexpected error."""
    return errors.UnhealthyError(
        "the queue's consumer has ended; its log line says why", retry_after=30
    )

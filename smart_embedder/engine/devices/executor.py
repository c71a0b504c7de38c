"""The consumer of a device: takes batches from the queue, runs them, and completes their jobs."""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import structlog

from smart_embedder.engine import clock
from smart_embedder.engine.devices.limits import (
    DeviceWatchdog,
    ForwardLimit,
    ServiceRate,
    TokenBudget,
    fail_overdue,
)
from smart_embedder.engine.devices.thread import DeviceGuard, DeviceThreads
from smart_embedder.engine.model import Model
from smart_embedder.engine.scheduling.batcher import Batch, Limits
from smart_embedder.engine.scheduling.job import Job, Purpose
from smart_embedder.engine.scheduling.queue import JobQueue, Preemption, is_long, split_short
from smart_embedder.errors import (
    DeviceCrashedError,
    DeviceFailedError,
    OutOfMemoryError,
    SmartEmbedderError,
    UnhealthyError,
)
from smart_embedder.observability.metrics import Metrics

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of a batch, or of a half of it after memory ran out.

    In the device's thread `batch` is left without the requests that have their outcome by then, and
    `begun` is set. `device_free` is what the forward launched before it has as `returned`, which is
    set once the device has computed it.
    """

    batch: Batch
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    device_free: asyncio.Event | None = None
    returned: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class InFlight:
    """A batch that was taken from the queue and is not completed yet.

    `device_free` is set when the batch before it is completed. `began` is when the device began it
    (0 before it is launched), or the last half of it after memory ran out, and `first_began` when
    it was launched as a whole. `preempted_seconds` is how long batches that preempted it had the
    device since `began`. `expected_seconds` are those of its forward.
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

    @property
    def seconds_left(self) -> float:
        """Seconds until the device has computed it, about."""
        if not self.began:
            return self.expected_seconds
        elapsed = clock.now() - self.began
        # A forward that takes longer than expected is expected to take half as long again.
        return self.expected_seconds - elapsed if elapsed < self.expected_seconds else elapsed / 2

    def begin(self) -> None:
        """Note that the device begins it, or the next half of it."""
        self.began, self.preempted_seconds = clock.now(), 0.0
        self.first_began = self.first_began or self.began


def observe_wait(metrics: Metrics, batch: Batch) -> None:
    """Count the wait of each job whose first sequences are taken for the first time."""
    if batch.handed_over:
        return
    for batch_slice in batch.slices:
        taken_at = batch_slice.job.first_taken_at
        if batch_slice.start == 0 and taken_at is not None:
            metrics.queue_wait.observe(taken_at - batch_slice.job.enqueued_at)


def observe_forward(metrics: Metrics, batch: Batch, seconds: float) -> None:
    """Count a forward of `seconds`."""
    metrics.tokens.labels(batch.model.name).inc(batch.tokens)
    metrics.batch_tokens.observe(batch.tokens)
    embedded = batch.count(Purpose.EMBEDDING)
    if embedded:
        metrics.batch_size.observe(embedded)
        metrics.embedding_inference.observe(seconds)
    if batch.count(Purpose.RERANKING):
        metrics.rerank_inference.observe(seconds)


class DeviceExecutor:
    """Runs batches one after the other on one device until it is cancelled or the device fails.

    `models` maps the model of a job to the one that this device runs, and `budgets` to what its
    forwards may hold. `on_stuck` is called when a forward has taken so long that it may never
    return. `on_failed` is called with the error that takes the device out of service; `has_others`
    says whether another device runs a model, which then gets the batches of this one.
    """

    def __init__(
        self,
        queue: JobQueue,
        threads: DeviceThreads,
        budgets: Mapping[Model, TokenBudget],
        limit: ForwardLimit,
        metrics: Metrics,
        *,
        guard: DeviceGuard,
        models: Mapping[Model, Model],
        batch_wait: float = 0.0,
        on_stuck: Callable[[], None] = lambda: None,
        on_failed: Callable[[DeviceFailedError], None] = lambda _: None,
        has_others: Callable[[Model], bool] = lambda _: False,
    ) -> None:
        self._queue = queue.consumer(self.serves)
        self._threads = threads
        self._budgets = budgets
        self._limit = limit
        self._metrics = metrics
        self._guard = guard
        self._models = models
        self._batch_wait = batch_wait
        self._slots = asyncio.Semaphore(threads.most_batches)
        self._in_flight: set[InFlight] = set()
        self._last_done = asyncio.Event()
        self._last_done.set()
        self._last_returned: asyncio.Event | None = None
        self._preemption: Preemption | None = None
        self._watchdog = DeviceWatchdog(on_stuck)
        self._on_stuck = on_stuck
        self._on_failed = on_failed
        self._has_others = has_others
        self.rate = ServiceRate()
        # Weak, so that an unloaded model is freed.
        self._rates = WeakKeyDictionary[Model, ServiceRate]()
        self.failed = False

    @property
    def stuck_seconds(self) -> float:
        """Seconds since a forward returned, if the device may never return; else 0."""
        return self._watchdog.stuck_seconds

    @property
    def tokens_per_second(self) -> float:
        """The measured rate; before the first forward that of the start, 0 if there is none."""
        at_start = self._limit.seconds_per_token
        return self.rate.tokens_per_second or (1 / at_start if at_start else 0.0)

    @property
    def batches(self) -> list[Batch]:
        """The batches on the device."""
        return [each.batch for each in self._in_flight]

    @property
    def seconds_left(self) -> float:
        """Seconds until it can take another batch, about."""
        running = [each for each in self._in_flight if each.preempts is None]
        if len(running) < self._threads.most_batches:
            return 0.0
        first = min(running, key=lambda each: each.began or math.inf)
        return first.seconds_left

    def serves(self, model: Model) -> bool:
        """Whether the device computes this model."""
        return not self.failed and model in self._models

    def is_using(self, model: Model) -> bool:
        """Whether a batch of this model is on the device."""
        return any(each.batch.model is model for each in self._in_flight)

    async def run(self) -> None:
        """Serve the queue. A batch that fails fails its own requests and no other."""
        async with asyncio.TaskGroup() as tasks:
            with self._queue.listener(self._offer):
                while not self.failed:
                    await self._serve_once(tasks)

    async def _serve_once(self, tasks: asyncio.TaskGroup) -> None:
        await self._queue.wait()
        if self._batch_wait:
            await asyncio.sleep(self._batch_wait)
        await self._slots.acquire()
        # As late as possible, so that the batch can hold jobs that arrived meanwhile.
        batch = None if self.failed else self._queue.take(self._limits_of)
        if batch is None:
            self._slots.release()
            return
        seconds = self._expected_seconds(batch)
        in_flight = InFlight(batch, device_free=self._last_done, expected_seconds=seconds)
        self._last_done = in_flight.done
        if batch.handed_over:
            await self._serve_alone(in_flight, tasks)
            return
        if self._threads.preemptible and is_long(seconds):
            self._let_short_jobs_preempt(in_flight, seconds, tasks)
        self._start(tasks, in_flight)
        await in_flight.launched.wait()

    async def _serve_alone(self, in_flight: InFlight, tasks: asyncio.TaskGroup) -> None:
        """Run a batch that has failed another device, and may fail this one, beside no other."""
        self._in_flight.add(in_flight)
        await in_flight.device_free.wait()
        self._start(tasks, in_flight)
        await in_flight.done.wait()

    def _limits_of(self, model: Model) -> Limits:
        return self._budgets[model].limits

    def _expected_seconds(self, batch: Batch) -> float:
        """The expected seconds of its forward; 0 if nothing is known yet."""
        rate = self._rates.get(batch.model)
        if rate is None or not rate.tokens_per_second:
            return self._limit.predicted(batch)
        return batch.tokens / rate.tokens_per_second

    def _start(self, tasks: asyncio.TaskGroup, in_flight: InFlight) -> None:
        observe_wait(self._metrics, in_flight.batch)
        self._in_flight.add(in_flight)
        tasks.create_task(self._execute(in_flight))

    def _let_short_jobs_preempt(
        self, in_flight: InFlight, seconds: float, tasks: asyncio.TaskGroup
    ) -> None:
        """Let short jobs run between the layers of this forward, first those of its own batch."""

        def start(batch: Batch) -> None:
            self._start(tasks, InFlight(batch, in_flight.device_free, preempts=in_flight))

        short, in_flight.batch = split_short(in_flight.batch)
        self._preemption = Preemption(in_flight.batch, seconds, self._queue, self._limits_of, start)
        if short.slices:
            self._preemption.begin(short)

    def _offer(self, job: Job) -> None:
        """Let a job that has just arrived preempt the running forward, if it is short.

        If that may never return, the job must not wait for it.
        """
        if self.stuck_seconds:
            self._on_stuck()
        elif self._preemption is not None:
            self._preemption.offer([job])

    def abort(self, error: SmartEmbedderError) -> None:
        """Fail every job on the device; its threads are not stopped."""
        for in_flight in self._in_flight:
            in_flight.batch.fail(error)

    async def _execute(self, in_flight: InFlight) -> None:
        ended = True
        try:
            await self._run_batch(in_flight.batch, in_flight)
            ended = False
        finally:
            if ended:  # An unexpected error ends the consumer: its callers must not wait for ever.
                in_flight.batch.fail(consumer_ended())
            self._in_flight.discard(in_flight)
            in_flight.launched.set()
            in_flight.done.set()
            self._free(in_flight)

    def _free(self, in_flight: InFlight) -> None:
        """Let the next batch begin, or the next batch that preempts."""
        preempted, preemption = in_flight.preempts, self._preemption
        if preempted is None:
            self._preemption = None
            self._slots.release()
        elif preemption is not None and preemption.batch is preempted.batch:
            first = in_flight.first_began
            seconds = clock.now() - first if first else 0.0
            preemption.ended(seconds)

    async def _run_batch(self, batch: Batch, in_flight: InFlight) -> None:
        forward = Forward(batch)
        # As a value: the callers of this batch must get it, whatever it is.
        outcome: list[Any] | BaseException
        (outcome,) = await asyncio.gather(
            self._on_device(forward, in_flight), return_exceptions=True
        )
        batch = forward.batch
        if isinstance(outcome, OutOfMemoryError):
            # By then the batch before it has returned its memory.
            await in_flight.device_free.wait()
            await self._run_in_halves(batch, outcome, in_flight)
        elif isinstance(outcome, DeviceFailedError):
            self._take_out_of_service(batch, outcome)
        elif isinstance(outcome, _NotLaunchedError):
            if self.failed:
                message = "a device has failed before it computed this"
                self._hand_over(batch, DeviceFailedError(message, retry_after=30))
        elif isinstance(outcome, Exception):
            if not isinstance(outcome, SmartEmbedderError):
                log.error(
                    "batch_failed", model=batch.model.name, tokens=batch.tokens, exc_info=outcome
                )
            batch.fail(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            self._complete(batch, outcome, in_flight)

    def _take_out_of_service(self, batch: Batch, error: DeviceFailedError) -> None:
        """Take no more batches; hand `batch` to another device, unless it may be the cause."""
        was_serving, self.failed = not self.failed, True
        if batch.handed_over or isinstance(error, DeviceCrashedError):
            batch.fail(error)
        else:
            self._hand_over(replace(batch, handed_over=True), error)
        if was_serving:
            self.rate = ServiceRate()
            self._on_failed(error)

    def _hand_over(self, batch: Batch, error: DeviceFailedError) -> None:
        """Give a batch to another device; it fails with `error` if none has its model."""
        if not self._has_others(batch.model):
            batch.fail(error)
            return
        log.warning("batch_handed_over", model=batch.model.name, tokens=batch.tokens)
        self._queue.hand_over(batch)

    def _complete(self, batch: Batch, results: list[Any], in_flight: InFlight) -> None:
        seconds = self._device_seconds(in_flight)
        if in_flight.preempts is None:  # Small batches say little of the device's rate.
            self.rate.observe(batch.tokens, seconds)
            self._rates.setdefault(batch.model, ServiceRate()).observe(batch.tokens, seconds)
        self._budgets[batch.model].recover()
        observe_forward(self._metrics, batch, seconds)
        batch.complete(results, seconds)

    def _device_seconds(self, in_flight: InFlight) -> float:
        """Seconds that the device worked on this batch alone."""
        seconds, preempted = clock.now() - in_flight.began, in_flight.preempts
        if preempted is None:
            return seconds - in_flight.preempted_seconds
        if in_flight.began > preempted.began > 0:
            preempted.preempted_seconds += seconds
        return seconds

    async def _run_in_halves(
        self, batch: Batch, error: OutOfMemoryError, in_flight: InFlight
    ) -> None:
        """Run each half by itself; a single sequence that does not fit fails its request."""
        halves = batch.halves()
        if not halves[0].slices:
            batch.fail(error)
            return
        self._metrics.splits.inc()
        self._budgets[batch.model].shrink(batch.tokens)
        left = self._limits_of(batch.model).max_tokens
        log.warning("out_of_memory", tokens=batch.tokens, max_batch_tokens=left)
        for half in halves:
            await self._run_batch(half, in_flight)

    async def _on_device(self, forward: Forward, in_flight: InFlight) -> list[Any]:
        with self._watchdog.over(self._limit.split(forward.batch).device):
            running = asyncio.ensure_future(self._compute(forward, in_flight))
            try:
                # The limits include neither the wait for the thread nor the forward before this
                # one, which may be of the batch after it if this is a half.
                await forward.begun.wait()
                if forward.device_free is not None and not forward.device_free.is_set():
                    await forward.device_free.wait()
                    in_flight.begin()
                await fail_overdue(forward.batch, self._limit.split(forward.batch), running)
                return await running
            finally:
                running.cancel()
                forward.returned.set()

    async def _compute(self, forward: Forward, in_flight: InFlight) -> list[Any]:
        model = self._models[forward.batch.model]
        preempts = in_flight.preempts is not None
        loop = asyncio.get_running_loop()

        def launch() -> Callable[[], list[Any]]:
            """Look at the latest moment for whom to compute, and on what: it may have waited."""
            batch = forward.batch.unresolved()
            if self.failed or not batch.slices:
                raise _NotLaunchedError
            forward.batch = batch
            if not preempts:
                forward.device_free, self._last_returned = self._last_returned, forward.returned
            in_flight.begin()
            loop.call_soon_threadsafe(forward.begun.set)
            collect = self._guard.guard(lambda: batch.launch(model))
            return lambda: self._guard.guard(collect)

        try:
            return await self._threads.compute(launch, in_flight.launched, preempts=preempts)
        finally:  # The thread may have ended before this began.
            forward.begun.set()


class _NotLaunchedError(Exception):
    """When it was its turn the device had failed, or nobody waited for it any longer."""


def consumer_ended() -> UnhealthyError:
    """The error of requests whose consumer has ended by an unexpected error."""
    return UnhealthyError("the queue's consumer has ended; its log line says why", retry_after=30)

"""The executor of a device: takes batches from the queue, runs them, and completes their jobs."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import structlog

from smart_embedder import errors
from smart_embedder.devices import forward_limits as limits
from smart_embedder.devices.thread import DeviceThread, run_guarded
from smart_embedder.interface import Model
from smart_embedder.metrics import EngineMetrics
from smart_embedder.requests import Purpose
from smart_embedder.scheduling.batcher import Batch, BatchLimits
from smart_embedder.scheduling.job import Job
from smart_embedder.scheduling.preemption import (
    MIN_PREEMPTED_SECONDS,
    Preemption,
    split_off_short_jobs,
)
from smart_embedder.scheduling.queue import JobQueue

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _ForwardTimes:
    """The start and the end of a forward on its device, which begins after the `previous` one.

    It is kept apart from `InFlightBatch`, so that no earlier batch is kept in memory.
    """

    launched_at: float = 0.0
    returned_at: float = 0.0
    previous: "_ForwardTimes | None" = None

    def get_start(self) -> float:
        """Return when the device began the forward, or 0 if it has not."""
        previous = self.previous
        if previous is not None:
            if not (free_at := previous.get_end()):
                return 0.0
            self.launched_at, self.previous = max(self.launched_at, free_at), None
        return self.launched_at

    def get_end(self) -> float:
        """Return when the device ended the forward and all before it, or 0 if it has not."""
        if not self.returned_at or not (start := self.get_start()):
            return 0.0
        return max(self.returned_at, start)


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch that was taken from the queue and is not completed yet.

    `device_free` is set when the previous batch is completed. `first_launched_at` is the time when
    the whole batch was launched, and `expected_seconds` the expected duration of its forward.

    `forward` is the part that is computed: all, or a half after an out-of-memory error, without the
    jobs that are resolved when it is launched. `times` are those of this part, and
    `preempted_seconds` is how long preempting batches have used the device since its launch.
    """

    batch: Batch
    device_free: asyncio.Event
    preempts: "InFlightBatch | None" = None
    expected_seconds: float = 0.0
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    first_launched_at: float = 0.0
    preempted_seconds: float = 0.0
    forward: Batch = field(init=False)
    times: _ForwardTimes = field(default_factory=_ForwardTimes)

    @property
    def seconds_left(self) -> float:
        """The estimated seconds until the device has computed the batch."""
        if not (start := self.times.get_start()):
            return self.expected_seconds
        elapsed = time.perf_counter() - start
        # After the expected end, the forward is expected to take half as long again.
        return self.expected_seconds - elapsed if elapsed < self.expected_seconds else elapsed / 2


@dataclass(eq=False)
class DeviceExecutor:
    """Runs batches on one device, one after the other, until it is cancelled or the device fails.

    A GPU has two threads, so that the next batch is launched while the current one is computed:
    `launching` launches forwards, and `collecting` waits for their results. A CPU computes in
    `launching`, where a call may preempt another one, and has no `collecting`.

    `models` maps the model of a job to the model on this device. `on_unavailable` is called when an
    error takes the device out of service, after which another device gets its batches, and when a
    forward has taken so long that it may never return.
    """

    name: str
    queue: JobQueue
    launching: DeviceThread
    collecting: DeviceThread | None
    _: KW_ONLY
    limit: limits.ForwardLimit
    metrics: EngineMetrics
    free_memory: Callable[[], object]
    models: dict[Model, limits.MeasuredModel]
    batch_wait: float
    on_unavailable: Callable[[], None]

    def __post_init__(self) -> None:
        self.watchdog = limits.DeviceWatchdog(self.on_unavailable)
        self.rate = limits.ServiceRate()
        self.failed = False
        self.max_batches = 1 if self.collecting is None else 2
        self._consumer = self.queue.add_consumer(self.serves)
        self._slots = asyncio.Semaphore(self.max_batches)
        self._in_flight: set[InFlightBatch] = set()
        self._last_done = asyncio.Event()
        self._last_done.set()
        self._last_times: _ForwardTimes | None = None
        self._preemption: Preemption | None = None

    @property
    def tokens_per_second(self) -> float:
        """The measured rate: of the forwards so far, else of the measurement at startup, else 0."""
        at_startup = next((served.seconds_per_token for served in self.models.values()), 0.0)
        return self.rate.tokens_per_second or (1 / at_startup if at_startup else 0.0)

    @property
    def batches(self) -> list[Batch]:
        """The batches on the device."""
        return [in_flight.batch for in_flight in self._in_flight]

    @property
    def seconds_left(self) -> float:
        """The estimated seconds until the device can take another batch."""
        running = [in_flight for in_flight in self._in_flight if in_flight.preempts is None]
        if len(running) < self.max_batches:
            return 0.0
        first = min(running, key=lambda in_flight: in_flight.first_launched_at or math.inf)
        return first.seconds_left

    def serves(self, model: Model) -> bool:
        """Return True if the device computes this model and has not failed."""
        return not self.failed and model in self.models

    async def run(self) -> None:
        """Serve the queue. If a batch fails, only its own jobs fail."""
        async with asyncio.TaskGroup() as tasks:
            self._consumer.on_arrival = self._offer_job
            try:
                while not self.failed:
                    await self._serve_once(tasks)
            finally:
                self._consumer.on_arrival = None

    async def _serve_once(self, tasks: asyncio.TaskGroup) -> None:
        await self._consumer.wait()
        if self.batch_wait:
            await asyncio.sleep(self.batch_wait)
        await self._slots.acquire()
        # Only now, so that the batch can hold jobs that arrived in the meantime.
        batch = None if self.failed else self.queue.take(self._limits_of, self.serves)
        if batch is None:
            self._slots.release()
            return
        served = self.models[batch.model]
        if served.rate.tokens_per_second:
            seconds = batch.tokens / served.rate.tokens_per_second
        else:
            seconds = limits.predict_seconds(batch, served.seconds_per_token)
        in_flight = InFlightBatch(batch, device_free=self._last_done, expected_seconds=seconds)
        self._last_done = in_flight.done
        self._in_flight.add(in_flight)
        if batch.handed_over:
            # Another device has failed on this batch: run it alone, as this device may fail too.
            await in_flight.device_free.wait()
        if batch.handed_over or (self.collecting is None and seconds <= MIN_PREEMPTED_SECONDS):
            await self._execute(in_flight)
            return
        if self.collecting is None:
            self._let_short_jobs_preempt(in_flight, tasks)
        tasks.create_task(self._execute(in_flight))
        await in_flight.launched.wait()

    def _limits_of(self, model: Model) -> BatchLimits:
        return self.models[model].budget.limits

    def _let_short_jobs_preempt(self, in_flight: InFlightBatch, tasks: asyncio.TaskGroup) -> None:
        """Let short jobs run between the layers of this forward, first those of the same batch."""

        def start(batch: Batch) -> None:
            preempting = InFlightBatch(batch, in_flight.device_free, preempts=in_flight)
            self._in_flight.add(preempting)
            tasks.create_task(self._execute(preempting))

        short, in_flight.batch = split_off_short_jobs(in_flight.batch)
        self._preemption = Preemption(
            in_flight.batch, in_flight.expected_seconds, self._consumer, self._limits_of, start
        )
        if short.slices:
            self._preemption.begin(short)

    def _offer_job(self, job: Job) -> None:
        """Let a job that has just arrived preempt the running forward, if the job is short.

        If the device is stuck, report that instead, so that the job does not wait for it.
        """
        if self.watchdog.stuck_seconds:
            self.on_unavailable()
        elif self._preemption is not None:
            self._preemption.offer([job])

    async def close(self, seconds: float) -> None:
        """End the threads; a running forward gets `seconds` to return."""
        threads = (self.launching, self.collecting)
        await asyncio.gather(*(thread.close(seconds) for thread in threads if thread is not None))

    async def _execute(self, in_flight: InFlightBatch) -> None:
        for part in in_flight.batch.slices:
            taken_at, is_first = part.job.first_taken_at, part.start == 0
            if taken_at is not None and is_first and not in_flight.batch.handed_over:
                self.metrics.waited(taken_at - part.job.enqueued_at)
        try:
            await self._run_batch(in_flight, in_flight.batch)
        except BaseException:  # The consumer ends, and its callers must not wait for ever.
            in_flight.batch.fail(consumer_ended_error())
            raise
        finally:
            self._in_flight.discard(in_flight)
            in_flight.launched.set()
            in_flight.done.set()
            # Let the next batch begin, or the next preempting batch.
            preempted, preemption = in_flight.preempts, self._preemption
            if preempted is None:
                self._preemption = None
                self._slots.release()
            elif preemption is not None and preemption.batch is preempted.batch:
                first = in_flight.first_launched_at
                preemption.end(time.perf_counter() - first if first else 0.0)

    async def _run_batch(self, in_flight: InFlightBatch, batch: Batch) -> None:
        """Run the whole batch, or a half of it."""
        in_flight.forward, in_flight.times, out_of_memory = batch, _ForwardTimes(), None
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
            # Wait until the previous batch has released its memory.
            await in_flight.device_free.wait()
            await self._run_halves(in_flight, out_of_memory)

    def _take_out_of_service(self, batch: Batch, error: errors.DeviceFailedError) -> None:
        """Take no more batches; hand `batch` over to another device, unless it may be the cause."""
        was_serving, self.failed = not self.failed, True
        if batch.handed_over or isinstance(error, errors.DeviceCrashedError):
            batch.fail(error)
        else:
            self._hand_over(replace(batch, handed_over=True), error)
        if was_serving:
            self.rate = limits.ServiceRate()
            log.error("device_failed", device=self.name, exc_info=error)
            self.on_unavailable()

    def _hand_over(self, batch: Batch, error: errors.DeviceFailedError) -> None:
        """Hand a batch over to another device; fail it with `error` if none has its model."""
        if not self.queue.is_served(batch.model):
            batch.fail(error)
            return
        log.warning("batch_handed_over", model=batch.model.name, tokens=batch.tokens)
        self.queue.hand_over(batch)

    def _complete(self, in_flight: InFlightBatch, results: list[Any]) -> None:
        batch = in_flight.forward
        # Seconds that the device worked on this batch alone.
        times, preempted = in_flight.times, in_flight.preempts
        start = times.get_start() or times.launched_at
        seconds = time.perf_counter() - start - self.watchdog.get_stopped_seconds(start)
        if preempted is None:
            seconds -= in_flight.preempted_seconds
            # Preempting batches are not counted: they are too small to show the device's rate.
            self.rate.observe(batch.tokens, seconds)
            self.models[batch.model].rate.observe(batch.tokens, seconds)
        elif start > preempted.times.launched_at > 0:
            preempted.preempted_seconds += seconds
        self.models[batch.model].budget.recover()
        counts = Counter[Purpose]()
        for part in batch.slices:
            counts[part.job.purpose] += part.count
        self.metrics.computed(
            batch.model.name,
            texts=counts[Purpose.EMBEDDING],
            pairs=counts[Purpose.RERANKING],
            tokens=batch.tokens,
            seconds=seconds,
        )
        batch.complete(results, seconds)

    async def _run_halves(self, in_flight: InFlightBatch, error: errors.OutOfMemoryError) -> None:
        """Run each half by itself; fail the job of a single sequence that does not fit."""
        batch = in_flight.forward
        halves = batch.split_in_half()
        if not halves[0].slices:
            batch.fail(error)
            return
        self.metrics.split()
        budget = self.models[batch.model].budget
        budget.shrink(batch.tokens)
        max_tokens = budget.limits.max_tokens
        log.warning("out_of_memory", tokens=batch.tokens, max_batch_tokens=max_tokens)
        for half in halves:
            await self._run_batch(in_flight, half)

    async def _compute(self, in_flight: InFlightBatch) -> list[Any]:
        """Compute a forward; jobs whose time limit passes in the meantime fail at once."""
        batch, times = in_flight.forward, in_flight.times
        served, preempts = self.models[batch.model], in_flight.preempts is not None
        get_limit = partial(self.limit.for_batch, seconds_per_token=served.seconds_per_token)
        # The limits include neither the wait for the thread nor the previous forward, which belongs
        # to the next batch if this forward is a half.
        alarm = limits.OverdueAlarm(
            lambda: in_flight.forward, times.get_start, get_limit, self.watchdog.get_stopped_seconds
        )
        launch = partial(self._launch, in_flight, served.replica)
        with self.watchdog.watch(self.limit.for_device(batch, served.seconds_per_token)):
            try:
                launched = await self.launching.run(
                    partial(run_guarded, launch, self.free_memory), preempts=preempts
                )
                if self.collecting is not None:
                    in_flight.launched.set()
                    collect = partial(run_guarded, launched, self.free_memory)
                    launched = await self.collecting.run(collect)
            finally:
                alarm.cancel()
                times.returned_at = time.perf_counter()
        results: list[Any] = launched
        return results

    def _launch(self, in_flight: InFlightBatch, model: Model) -> Any:
        """Launch the forward for the jobs that are still unresolved, in the device thread.

        Returns the results. With a second thread, returns a function that collects them there.
        """
        batch = in_flight.forward.drop_resolved()
        if self.failed or not batch.slices:
            raise _NotLaunchedError
        in_flight.forward = batch
        times, now = in_flight.times, time.perf_counter()
        if in_flight.preempts is None:
            last, self._last_times = self._last_times, times
            times.previous = last if last is not None and not last.get_end() else None
        times.launched_at, in_flight.preempted_seconds = now, 0.0
        in_flight.first_launched_at = in_flight.first_launched_at or now
        collect = batch.launch(model)
        return collect() if self.collecting is None else collect


class _NotLaunchedError(Exception):
    """The forward was not launched: the device had failed, or all its jobs were resolved."""


def consumer_ended_error() -> errors.UnhealthyError:
    """Return the error of requests whose consumer has ended by an unexpected error."""
    return errors.UnhealthyError(
        "the queue's consumer has ended; its log line says why", retry_after=30
    )

"""The consumer of a device: takes batches from the queue, runs them, and completes their jobs."""

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
from smart_embedder.devices.thread import DeviceThread, guarded
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
class _Turn:
    """When the device computes a forward: after the one launched `before`. Keeps no batch alive."""

    launched_at: float = 0.0
    returned_at: float = 0.0
    before: "_Turn | None" = None

    def began(self) -> float:
        """When the device began it; 0 until then."""
        before = self.before
        if before is not None:
            if not (free_at := before.ended()):
                return 0.0
            self.launched_at, self.before = max(self.launched_at, free_at), None
        return self.launched_at

    def ended(self) -> float:
        """When the device had computed it, and all before it; 0 until then."""
        return max(self.returned_at, began) if self.returned_at and (began := self.began()) else 0.0


@dataclass(slots=True, eq=False)
class InFlight:
    """A batch that was taken from the queue and is not completed yet.

    `device_free` is set when the batch before it is completed. `first_launched_at` is when it was
    launched as a whole. `expected_seconds` are those of its forward.

    `forward` is what is computed of it: all, or a half after memory ran out, without the requests
    that have their outcome by its launch. `turn` tells when that is computed, `preempted_seconds`
    how long batches that preempted it had the device since its launch.
    """

    batch: Batch
    device_free: asyncio.Event
    preempts: "InFlight | None" = None
    expected_seconds: float = 0.0
    launched: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    first_launched_at: float = 0.0
    preempted_seconds: float = 0.0
    forward: Batch = field(init=False)
    turn: _Turn = field(default_factory=_Turn)

    @property
    def seconds_left(self) -> float:
        """Seconds until the device has computed it, about."""
        if not (began := self.turn.began()):
            return self.expected_seconds
        elapsed = time.perf_counter() - began
        # A forward that takes longer than expected is expected to take half as long again.
        return self.expected_seconds - elapsed if elapsed < self.expected_seconds else elapsed / 2


@dataclass(eq=False)
class DeviceExecutor:
    """Runs batches one after the other on one device until it is cancelled or the device fails.

    A GPU has two threads, so that the next batch is launched while the last one is computed:
    `launching` launches forwards, and `collecting` waits for their results. A CPU computes in
    `launching`, where a call may run within another, and has no `collecting`.

    `models` has those that it computes, by the model of a job. `on_lost` is called as an error
    takes the device out of service, whose batches another one then gets, and when a forward has
    taken so long that it may never return.
    """

    name: str
    queue: JobQueue
    launching: DeviceThread
    collecting: DeviceThread | None
    _: KW_ONLY
    limit: limits.ForwardLimit
    metrics: EngineMetrics
    free_memory: Callable[[], object]
    models: dict[Model, limits.Served]
    batch_wait: float
    on_lost: Callable[[], None]

    def __post_init__(self) -> None:
        """It serves its part of the queue from now on."""
        self.watchdog = limits.DeviceWatchdog(self.on_lost)
        self.rate = limits.ServiceRate()
        self.failed = False
        self.most_batches = 1 if self.collecting is None else 2
        self._consumer = self.queue.add_consumer(self.serves)
        self._slots = asyncio.Semaphore(self.most_batches)
        self._in_flight: set[InFlight] = set()
        self._last_done = asyncio.Event()
        self._last_done.set()
        self._last_turn: _Turn | None = None
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
        first = min(running, key=lambda each: each.first_launched_at or math.inf)
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
        if self.batch_wait:
            await asyncio.sleep(self.batch_wait)
        await self._slots.acquire()
        # As late as possible, so that the batch can hold jobs that arrived meanwhile.
        batch = None if self.failed else self.queue.take(self._limits_of, self.serves)
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
        self._in_flight.add(in_flight)
        if batch.handed_over:
            # It has failed another device, and may fail this one: it runs beside no other.
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

    def _let_short_jobs_preempt(self, in_flight: InFlight, tasks: asyncio.TaskGroup) -> None:
        """Let short jobs run between the layers of this forward, first those of its own batch."""

        def start(batch: Batch) -> None:
            preempting = InFlight(batch, in_flight.device_free, preempts=in_flight)
            self._in_flight.add(preempting)
            tasks.create_task(self._execute(preempting))

        short, in_flight.batch = split_off_short_jobs(in_flight.batch)
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
            self.on_lost()
        elif self._preemption is not None:
            self._preemption.offer([job])

    async def close(self, seconds: float) -> None:
        """End its threads; a running forward gets `seconds` to return."""
        threads = (self.launching, self.collecting)
        await asyncio.gather(*(each.close(seconds) for each in threads if each is not None))

    async def _execute(self, in_flight: InFlight) -> None:
        for each in in_flight.batch.slices:
            taken_at, is_first = each.job.first_taken_at, each.start == 0
            if taken_at is not None and is_first and not in_flight.batch.handed_over:
                self.metrics.waited(taken_at - each.job.enqueued_at)
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
                first = in_flight.first_launched_at
                preemption.end(time.perf_counter() - first if first else 0.0)

    async def _run_batch(self, in_flight: InFlight, batch: Batch) -> None:
        """Run it, or a half of it."""
        in_flight.forward, in_flight.turn, out_of_memory = batch, _Turn(), None
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
            self.on_lost()

    def _hand_over(self, batch: Batch, error: errors.DeviceFailedError) -> None:
        """Give a batch to another device; it fails with `error` if none has its model."""
        if not self.queue.is_served(batch.model):
            batch.fail(error)
            return
        log.warning("batch_handed_over", model=batch.model.name, tokens=batch.tokens)
        self.queue.hand_over(batch)

    def _complete(self, in_flight: InFlight, results: list[Any]) -> None:
        batch = in_flight.forward
        # Seconds that the device worked on this batch alone.
        turn, preempted = in_flight.turn, in_flight.preempts
        began = turn.began() or turn.launched_at
        seconds = time.perf_counter() - began - self.watchdog.stopped_since(began)
        if preempted is None:
            seconds -= in_flight.preempted_seconds
            # Those that preempt are small, and say little of the device's rate.
            self.rate.observe(batch.tokens, seconds)
            self.models[batch.model].rate.observe(batch.tokens, seconds)
        elif began > preempted.turn.launched_at > 0:
            preempted.preempted_seconds += seconds
        self.models[batch.model].budget.recover()
        counts = Counter[Purpose]()
        for each in batch.slices:
            counts[each.job.purpose] += each.count
        self.metrics.computed(
            batch.model.name,
            texts=counts[Purpose.EMBEDDING],
            pairs=counts[Purpose.RERANKING],
            tokens=batch.tokens,
            seconds=seconds,
        )
        batch.complete(results, seconds)

    async def _run_in_halves(self, in_flight: InFlight, error: errors.OutOfMemoryError) -> None:
        """Run each half by itself; a single sequence that does not fit fails its request."""
        batch = in_flight.forward
        halves = batch.split_in_half()
        if not halves[0].slices:
            batch.fail(error)
            return
        self.metrics.split()
        budget = self.models[batch.model].budget
        budget.shrink(batch.tokens)
        left = budget.limits.max_tokens
        log.warning("out_of_memory", tokens=batch.tokens, max_batch_tokens=left)
        for half in halves:
            await self._run_batch(in_flight, half)

    async def _compute(self, in_flight: InFlight) -> list[Any]:
        """The results of a forward, which may be above the time limits of its jobs."""
        batch, turn = in_flight.forward, in_flight.turn
        served, preempts = self.models[batch.model], in_flight.preempts is not None
        whole = partial(self.limit.of_batch, seconds_per_token=served.seconds_per_token)
        # The limits include neither the wait for the thread nor the forward before this one, which
        # may be of the batch after it if this is a half.
        stopped_since = self.watchdog.stopped_since
        alarm = limits.OverdueAlarm(lambda: in_flight.forward, turn.began, whole, stopped_since)
        launch = partial(guarded, partial(self._launch, in_flight, served.runs), self.free_memory)
        with self.watchdog.over(self.limit.of_device(batch, served.seconds_per_token)):
            try:
                launched = await self.launching.run(launch, preempts=preempts)
                if self.collecting is not None:
                    in_flight.launched.set()
                    collect = partial(guarded, launched, self.free_memory)
                    launched = await self.collecting.run(collect)
            finally:
                alarm.cancel()
                turn.returned_at = time.perf_counter()
        results: list[Any] = launched
        return results

    def _launch(self, in_flight: InFlight, model: Model) -> Any:
        """Look at the latest moment for whom to compute, and on what: it may have waited.

        Returns the results, or with a second thread what collects them there.
        """
        batch = in_flight.forward.drop_resolved()
        if self.failed or not batch.slices:
            raise _NotLaunchedError
        in_flight.forward = batch
        turn, now = in_flight.turn, time.perf_counter()
        if in_flight.preempts is None:
            last, self._last_turn = self._last_turn, turn
            turn.before = last if last is not None and not last.ended() else None
        turn.launched_at, in_flight.preempted_seconds = now, 0.0
        in_flight.first_launched_at = in_flight.first_launched_at or now
        collect = batch.launch(model)
        return collect() if self.collecting is None else collect


class _NotLaunchedError(Exception):
    """When it was its turn the device had failed, or nobody waited for it any longer."""


def consumer_ended() -> errors.UnhealthyError:
    """The error of requests whose consumer has ended by an unexpected error."""
    return errors.UnhealthyError(
        "the queue's consumer has ended; its log line says why", retry_after=30
    )

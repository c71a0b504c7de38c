"""Every device behind one queue: a thread and a consumer for each."""

import asyncio
import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import structlog

from smart_embedder.engine.devices.executor import DeviceExecutor, consumer_ended
from smart_embedder.engine.devices.limits import CPU_SECONDS, GPU_SECONDS, ForwardLimit, TokenBudget
from smart_embedder.engine.devices.thread import (
    DeviceGuard,
    DeviceThread,
    DeviceThreads,
    ThreadFactory,
)
from smart_embedder.engine.model import (
    LoadedModels,
    Loader,
    Measured,
    Model,
    PlacedModel,
    PlacedModels,
)
from smart_embedder.engine.scheduling.batcher import Batch
from smart_embedder.engine.scheduling.job import JobState, Purpose
from smart_embedder.engine.scheduling.queue import JobQueue
from smart_embedder.errors import DeviceFailedError, SmartEmbedderError, UnhealthyError
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings

log = structlog.get_logger(__name__)

# Seconds for an idle thread to end.
_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class _DeviceWorker:
    """One device: its threads, its executor and its consumer task.

    `models` maps the model of a job to the one that this device runs, and `budgets` to what its
    forwards may hold. `seconds_of` holds the seconds per token of the models of MODELS. A guest
    runs only models of MODELS, whose entries name its device.
    """

    name: str
    threads: DeviceThreads
    guard: DeviceGuard
    models: dict[Model, Model]
    budgets: dict[Model, TokenBudget]
    seconds_of: dict[Model, float]
    executor: DeviceExecutor
    consumer: "asyncio.Task[None]"
    is_guest: bool


class DevicePool:
    """Serves one queue with the devices of the default models and those of MODELS."""

    def __init__(
        self,
        settings: Settings,
        queue: JobQueue,
        metrics: Metrics,
        make_thread: ThreadFactory = DeviceThread,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._metrics = metrics
        self._make_thread = make_thread
        self._first_thread = make_thread("device", None)
        self._workers: list[_DeviceWorker] = []

    async def start(self, loader: Loader) -> LoadedModels:
        """Load the models in the first device's thread, then start the workers of all devices."""
        models = await self._first_thread.run(partial(loader, self._settings))
        if models.prepare_thread is not None:
            await self._first_thread.close(_PATIENCE)
            self._first_thread = self._make_thread("device", models.prepare_thread)
        for own in (models, *models.replicas):
            thread = self._first_thread
            if own is not models:
                thread = self._make_thread(f"device-{len(self._workers)}", own.prepare_thread)
            measured = Measured(own.max_batch_tokens, own.seconds_per_token)
            runs = dict(zip(models.each, own.each, strict=True))
            self._start_worker(thread, own, runs, measured)
        return models

    async def add(self, placed: PlacedModels, *, thoroughly: bool) -> Model:
        """Add a model to the devices that it is placed on; a device without a worker gets one.

        `thoroughly` allows a measurement that occupies a device for longer. Returns the model to
        give to jobs. Raises the errors of its first forward.
        """
        model = placed.models[0].model
        with ExitStack() as undo:
            undo.callback(self.remove, model)
            for placed_model in placed.models:
                await self._add_to_device(model, placed_model, thoroughly=thoroughly)
            undo.pop_all()
        return model

    async def _add_to_device(
        self, model: Model, placed_model: PlacedModel, *, thoroughly: bool
    ) -> None:
        found = (worker for worker in self._workers if worker.name == placed_model.device.name)
        worker = next(found, None)
        if worker is None:
            name = f"device-{len(self._workers)}"
            thread = self._make_thread(name, placed_model.prepare_thread)
            guard = DeviceGuard(placed_model.free_memory)
            measured = await _measure(placed_model, thread, guard, thoroughly=True)
            worker = self._start_worker(thread, placed_model, {}, measured, is_guest=True)
        else:
            guard, thread = worker.guard, worker.threads.launching
            measured = await _measure(placed_model, thread, guard, thoroughly=thoroughly)
        worker.seconds_of[model] = measured.seconds_per_token
        worker.budgets[model] = self._budget(measured)
        worker.models[model] = placed_model.model

    def remove(self, model: Model) -> None:
        """Remove a model, for which no job may wait."""
        for worker in self._workers:
            worker.models.pop(model, None)
            worker.budgets.pop(model, None)
            worker.seconds_of.pop(model, None)

    def token_budgets(self, name: str) -> dict[str, int]:
        """The tokens that one forward of the model of this name may hold now, on each device."""
        return {
            worker.name: budget.limits.max_tokens
            for worker in self._workers
            for model, budget in worker.budgets.items()
            if model.name == name
        }

    def is_using(self, model: Model) -> bool:
        """Whether a device works on this model, or a job waits for it."""
        waits = self._queue.has_work(lambda each: each is model)
        return waits or any(worker.executor.is_using(model) for worker in self._workers)

    def serves(self, model: Model) -> bool:
        """Whether a device that has not failed computes this model."""
        return any(worker.executor.serves(model) for worker in self._workers)

    @property
    def stuck_seconds(self) -> float:
        """Seconds since the longest stuck device returned from a forward; 0 if none is stuck."""
        return max((worker.executor.stuck_seconds for worker in self._workers), default=0.0)

    @property
    def ended(self) -> bool:
        """Whether a consumer has ended by a fault of its own."""
        return any(
            worker.consumer.done() and not worker.executor.failed for worker in self._workers
        )

    @property
    def failed(self) -> list[str]:
        """The devices that have failed and are out of service."""
        return [worker.name for worker in self._workers if worker.executor.failed]

    @property
    def all_failed(self) -> bool:
        """Whether every device of the default models has failed."""
        own = [worker for worker in self._workers if not worker.is_guest]
        return bool(own) and all(worker.executor.failed for worker in own)

    def seconds_to_place(self, purpose: Purpose) -> int:
        """Seconds until a request of this purpose leaves its place, about; at least 1.

        One that embeds leaves it when a device has taken the last of its sequences, one that
        reranks when it has its scores. The forward that runs is included.
        """
        executors = [each.executor for each in self._workers if not each.executor.failed]
        seconds = min((each.seconds_left for each in executors), default=0.0)
        running = (batch for each in executors for batch in each.batches)
        if purpose is Purpose.RERANKING and any(_ends_with(batch, purpose) for batch in running):
            return max(1, math.ceil(seconds))
        rate = sum(each.tokens_per_second for each in executors)
        found = self._queue.next_to_leave(purpose)
        if found is not None and rate:
            job, tokens = found
            last = len(job.sequences[-1])
            if purpose is Purpose.RERANKING:
                tokens += last
            else:  # So many are taken with the last.
                tokens -= max(0, self._most_tokens_of(job.model) - last)
            seconds += max(0, tokens) / rate
        return max(1, math.ceil(seconds))

    def _most_tokens_of(self, model: Model) -> int:
        """The tokens that a forward of this model may hold, on the device that allows most."""
        budgets = [each.budgets[model] for each in self._workers if model in each.budgets]
        return max((budget.limits.max_tokens for budget in budgets), default=0)

    def abort(self, error: SmartEmbedderError) -> None:
        """Fail every job that waits or is on a device, and every later job."""
        self._queue.close(error)
        for worker in self._workers:
            worker.executor.abort(error)

    async def close(self, seconds: float) -> None:
        """End the consumers and the threads; a running forward gets `seconds` to return."""
        for worker in self._workers:
            worker.consumer.cancel()
            await asyncio.wait({worker.consumer})
        if not self._workers:
            await self._first_thread.close(seconds)
        await asyncio.gather(*(worker.threads.close(seconds) for worker in self._workers))

    def _start_worker(
        self,
        thread: DeviceThread,
        setup: LoadedModels | PlacedModel,
        models: dict[Model, Model],
        measured: Measured,
        *,
        is_guest: bool = False,
    ) -> _DeviceWorker:
        name, on_gpu = setup.device.name, setup.device.gpu_available
        collect = self._make_thread(f"{name}-results", None) if on_gpu else None
        threads = DeviceThreads(thread, collect)
        guard, seconds_of = DeviceGuard(setup.free_memory), dict[Model, float]()
        budgets = {model: self._budget(measured) for model in models}
        limit = ForwardLimit(
            self._settings.gpu_process_timeout,
            GPU_SECONDS if on_gpu else CPU_SECONDS,
            measured.seconds_per_token,
            seconds_of,
        )
        executor = DeviceExecutor(
            self._queue,
            threads,
            budgets,
            limit,
            self._metrics,
            guard=guard,
            models=models,
            batch_wait=self._settings.batch_wait_ms / 1000,
            on_stuck=self._fail_what_waits_for_stuck_devices,
            on_failed=partial(self._go_on_without, name),
            has_others=self.serves,
        )
        consumer = asyncio.create_task(executor.run(), name=f"{name}-consumer")
        consumer.add_done_callback(self._close_queue_without_consumers)
        worker = _DeviceWorker(
            name, threads, guard, models, budgets, seconds_of, executor, consumer, is_guest
        )
        self._workers.append(worker)
        return worker

    def _budget(self, measured: Measured) -> TokenBudget:
        settings = self._settings
        return TokenBudget(
            measured.max_batch_tokens, settings.max_batch_sequences, settings.max_requests_in_batch
        )

    def _go_on_without(self, name: str, error: DeviceFailedError) -> None:
        log.error("device_failed", device=name, exc_info=error)
        if self.all_failed:
            self._queue.close(no_device_left())
            return
        self._queue.fail(device_of_model_failed(), of=lambda model: not self.serves(model))
        # The devices that are left may be stuck.
        self._fail_what_waits_for_stuck_devices()

    def _fail_what_waits_for_stuck_devices(self) -> None:
        """Fail the jobs that wait for a model of which every device that serves it is stuck."""

        def all_are_stuck(model: Model) -> bool:
            executors = (each.executor for each in self._workers)
            return all(each.stuck_seconds for each in executors if each.serves(model))

        error = UnhealthyError("the device does not come back from a forward", retry_after=30)
        self._queue.fail(error, of=all_are_stuck)

    def _close_queue_without_consumers(self, ended: "asyncio.Task[None]") -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is None:
            return
        log.error("consumer_ended", exc_info=error)
        if all(each.executor.failed or each.consumer.done() for each in self._workers):
            self._queue.close(consumer_ended())


def _ends_with(batch: Batch, purpose: Purpose) -> bool:
    """Whether a job of this purpose has no sequences beyond this batch."""
    jobs = (each.job for each in batch.slices)
    return any(job.purpose is purpose and job.state is JobState.TAKEN for job in jobs)


async def _measure(
    placed_model: PlacedModel, thread: DeviceThread, guard: DeviceGuard, *, thoroughly: bool
) -> Measured:
    """Measure a model, one call in the device's thread for each step."""
    steps = placed_model.measure(thoroughly)
    while True:
        measured = await thread.run(lambda: guard.guard(lambda: next(steps)))
        if measured is not None:
            return measured


def no_device_left() -> UnhealthyError:
    """The error of every request once the last device has failed."""
    message = "every device has failed, and the service must be restarted; its log says why"
    return UnhealthyError(message, retry_after=30)


def device_of_model_failed() -> UnhealthyError:
    """The error of requests whose model is only on a device that has failed."""
    message = "the device of this model has failed, and the service must be restarted to have it"
    return UnhealthyError(message, retry_after=30)


def find_failure(
    loading: "asyncio.Future[LoadedModels] | None",
    devices: DevicePool,
    *,
    closing: bool,
) -> Exception | None:
    """The failure of the start, the devices or a consumer; or None."""
    cause = start_failure(loading)
    if cause is not None:
        # The cause may name folders of this machine, so clients get another message.
        error = UnhealthyError("the models could not be loaded; the log says why")
        error.__cause__ = cause
        return error
    if devices.all_failed:
        return no_device_left()
    if devices.ended and not closing:
        return consumer_ended()
    away = devices.stuck_seconds
    if away:
        return UnhealthyError(
            f"the device thread has not come back from a forward for {away:.0f} seconds"
        )
    return None


def start_failure(loading: "asyncio.Future[LoadedModels] | None") -> BaseException | None:
    """Why loading failed; None if it succeeded or is not over."""
    if loading is None or not loading.done() or loading.cancelled():
        return None
    return loading.exception()

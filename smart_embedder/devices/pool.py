"""All devices behind one queue, with an executor for each."""

import asyncio
import math
from functools import partial
from typing import Any

import structlog

from smart_embedder.devices import forward_limits as limits
from smart_embedder.devices.executor import DeviceExecutor, consumer_ended_error
from smart_embedder.devices.thread import DeviceThread, ThreadFactory, run_guarded
from smart_embedder.errors import UnhealthyError
from smart_embedder.interface import (
    Model,
    PlacedModel,
    PlacedModels,
)
from smart_embedder.metrics import EngineMetrics
from smart_embedder.requests import Purpose
from smart_embedder.scheduling.queue import JobQueue
from smart_embedder.settings import EngineSettings

log = structlog.get_logger(__name__)


class DevicePool:
    """Serves one queue with the devices of the default models and of MODELS.

    `all_failed` is True when all devices of the default models have failed.
    """

    def __init__(
        self,
        settings: EngineSettings,
        queue: JobQueue,
        metrics: EngineMetrics,
        make_thread: ThreadFactory = DeviceThread,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._metrics = metrics
        self._make_thread = make_thread
        self._executors: dict[DeviceExecutor, asyncio.Task[None]] = {}
        self._defaults: list[Model] = []
        self.all_failed = False

    async def add(
        self, placed: PlacedModels, *, thoroughly: bool, is_default: bool = False
    ) -> Model:
        """Measure a model on its devices and serve it there; start executors for new devices.

        `thoroughly` allows a measurement that occupies a device for longer. When no device serves
        any default model (`is_default`), the service is unhealthy. Returns the model for jobs.
        Raises the errors of its first forward.
        """
        model = placed.models[0].model
        try:
            for replica in placed.models:
                name = replica.device.name
                executor = next((known for known in self._executors if known.name == name), None)
                is_new = executor is None  # No request waits for this device.
                executor = executor or self._start_executor(replica)
                steps, measured = replica.measure(thoroughly or is_new), None
                while measured is None:  # Run each step as a call of its own in the device thread.
                    step = partial(run_guarded, partial(next, steps), executor.free_memory)
                    measured = await executor.launching.run(step)
                max_tokens, settings = measured.max_batch_tokens, self._settings
                budget = limits.TokenBudget(
                    max_tokens, settings.max_batch_sequences, settings.max_requests_in_batch
                )
                executor.models[model] = limits.MeasuredModel(
                    replica.model, budget, measured.seconds_per_token
                )
        except BaseException:
            self.remove(model)
            raise
        if is_default:
            self._defaults.append(model)
        return model

    def remove(self, model: Model) -> None:
        """Remove a model. No job may wait for it."""
        for executor in self._executors:
            executor.models.pop(model, None)

    def token_budgets(self, model: Model | None) -> dict[str, int]:
        """Return the current token budget of the model on each of its devices."""
        return {
            executor.name: executor.models[model].budget.limits.max_tokens
            for executor in self._executors
            if model in executor.models
        }

    def is_using(self, model: Model) -> bool:
        """Return True if a device works on this model, or a job waits for it."""
        on_devices = (batch for executor in self._executors for batch in executor.batches)
        return self._queue.has_work(lambda waiting: waiting is model) or any(
            batch.model is model for batch in on_devices
        )

    def serves(self, model: Model) -> bool:
        """Return True if a device that has not failed serves this model."""
        return self._queue.is_served(model)

    @property
    def stuck_seconds(self) -> float:
        """Seconds since the longest stuck device returned from a forward; 0 if none is stuck."""
        watchdogs = (executor.watchdog for executor in self._executors)
        return max((watchdog.stuck_seconds for watchdog in watchdogs), default=0.0)

    @property
    def failed(self) -> list[str]:
        """The names of the devices that have failed and are out of service."""
        return [executor.name for executor in self._executors if executor.failed]

    @property
    def failure(self) -> Exception | None:
        """The error that makes the service unhealthy, or None.

        All devices have failed, a consumer has ended, or a device is stuck.
        """
        if self.all_failed:
            return all_devices_failed_error()
        for executor, consumer in self._executors.items():
            if get_error(consumer) is not None and not executor.failed:
                return consumer_ended_error()
        if seconds := self.stuck_seconds:
            return UnhealthyError(
                f"the device thread has not come back from a forward for {seconds:.0f} seconds"
            )
        return None

    def estimate_retry_after(self, purpose: Purpose) -> int:
        """Estimate the seconds until a request of this purpose releases its permit; at least 1.

        This is the rest of the running forward, and the time for the tokens that are taken before.
        An embedding request releases its permit when its last forward begins, a reranking request
        when that has ended.
        """
        executors = [executor for executor in self._executors if not executor.failed]
        seconds = min((executor.seconds_left for executor in executors), default=0.0)
        if rate := sum(executor.tokens_per_second for executor in executors):
            placed = [model for executor in executors for model in executor.models.values()]
            largest = max((model.budget.limits.max_tokens for model in placed), default=0)
            last = largest if purpose is Purpose.EMBEDDING else 0
            seconds += self._queue.estimate_tokens_ahead(purpose, last) / rate
        return max(1, math.ceil(seconds))

    async def close(self, seconds: float) -> None:
        """End the executors and their threads; a running forward gets `seconds` to return."""
        for consumer in self._executors.values():
            consumer.cancel()
            await asyncio.wait({consumer})
        await asyncio.gather(*(executor.close(seconds) for executor in self._executors))

    def _start_executor(self, placed: PlacedModel) -> DeviceExecutor:
        name, on_gpu = placed.device.name, placed.device.gpu_available
        executor = DeviceExecutor(
            name,
            self._queue,
            self._make_thread(f"device-{len(self._executors)}", placed.prepare_thread),
            self._make_thread(f"{name}-results", None) if on_gpu else None,
            limit=limits.ForwardLimit(
                self._settings.gpu_process_timeout,
                limits.GPU_SECONDS if on_gpu else limits.CPU_SECONDS,
            ),
            metrics=self._metrics,
            free_memory=placed.free_memory,
            models={},
            batch_wait=self._settings.batch_wait_ms / 1000,
            on_unavailable=self._fail_unservable_jobs,
        )
        consumer = asyncio.create_task(executor.run(), name=f"{name}-consumer")
        consumer.add_done_callback(self._close_queue_without_consumers)
        self._executors[executor] = consumer
        return executor

    def _fail_unservable_jobs(self) -> None:
        """Fail the jobs that wait for a model whose devices have all failed, or are all stuck."""

        def is_stuck(model: Model) -> bool:
            serving = (executor for executor in self._executors if executor.serves(model))
            return all(executor.watchdog.stuck_seconds for executor in serving)

        self.all_failed = bool(self._defaults) and not any(map(self.serves, self._defaults))
        if self.all_failed:
            self._queue.close(all_devices_failed_error())
            return
        self._queue.fail(model_device_failed_error(), of=lambda model: not self.serves(model))
        error = UnhealthyError("the device does not come back from a forward", retry_after=30)
        self._queue.fail(error, of=is_stuck)

    def _close_queue_without_consumers(self, ended: "asyncio.Task[None]") -> None:
        if (error := get_error(ended)) is None:
            return
        log.error("consumer_ended", exc_info=error)
        if all(
            executor.failed or consumer.done() for executor, consumer in self._executors.items()
        ):
            self._queue.close(consumer_ended_error())


def all_devices_failed_error() -> UnhealthyError:
    """Return the error of all requests once the last device has failed."""
    message = "every device has failed, and the service must be restarted; its log says why"
    return UnhealthyError(message, retry_after=30)


def model_device_failed_error() -> UnhealthyError:
    """Return the error of requests whose model is only on devices that have failed."""
    message = "the device of this model has failed, and the service must be restarted to have it"
    return UnhealthyError(message, retry_after=30)


def get_error(task: "asyncio.Future[Any] | None") -> BaseException | None:
    """Return the error of a task; None if it succeeded, was cancelled or is not done."""
    if task is None or not task.done() or task.cancelled():
        return None
    return task.exception()

"""Every device behind one queue: a thread and a consumer for each."""

import asyncio
import math
from functools import partial
from typing import Any

import structlog

from smart_embedder.devices import forward_limits as limits
from smart_embedder.devices.executor import DeviceExecutor, consumer_ended
from smart_embedder.devices.thread import DeviceThread, ThreadFactory, guarded
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
    """Serves one queue with the devices of the default models and those of MODELS.

    `all_failed` says that no device of the default models is left.
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
        """Add a model to the devices that it is placed on; a device without a worker gets one.

        `thoroughly` allows a measurement that occupies a device for longer. Without a device for
        any model that `is_default` there is no service. Returns the model to give to jobs. Raises
        the errors of its first forward.
        """
        model = placed.models[0].model
        try:
            for each in placed.models:
                name = each.device.name
                executor = next((own for own in self._executors if own.name == name), None)
                is_free = executor is None  # Nobody else waits there.
                executor = executor or self._start_worker(each)
                steps, measured = each.measure(thoroughly or is_free), None
                while measured is None:  # One call in the device's thread for each step.
                    step = partial(guarded, partial(next, steps), executor.free_memory)
                    measured = await executor.launching.run(step)
                most, settings = measured.max_batch_tokens, self._settings
                budget = limits.TokenBudget(
                    most, settings.max_batch_sequences, settings.max_requests_in_batch
                )
                executor.models[model] = limits.Served(
                    each.model, budget, measured.seconds_per_token
                )
        except BaseException:
            self.remove(model)
            raise
        if is_default:
            self._defaults.append(model)
        return model

    def remove(self, model: Model) -> None:
        """Remove a model, for which no job may wait."""
        for executor in self._executors:
            executor.models.pop(model, None)

    def token_budgets(self, model: Model | None) -> dict[str, int]:
        """The tokens that one forward of the model may hold now, on each device that has it."""
        return {
            executor.name: executor.models[model].budget.limits.max_tokens
            for executor in self._executors
            if model in executor.models
        }

    def is_using(self, model: Model) -> bool:
        """Whether a device works on this model, or a job waits for it."""
        on_devices = (batch for executor in self._executors for batch in executor.batches)
        return self._queue.has_work(lambda each: each is model) or any(
            batch.model is model for batch in on_devices
        )

    def serves(self, model: Model) -> bool:
        """Whether a device that has not failed computes this model."""
        return self._queue.is_served(model)

    @property
    def stuck_seconds(self) -> float:
        """Seconds since the longest stuck device returned from a forward; 0 if none is stuck."""
        dogs = (executor.watchdog for executor in self._executors)
        return max((dog.stuck_seconds for dog in dogs), default=0.0)

    @property
    def failed(self) -> list[str]:
        """The devices that have failed and are out of service."""
        return [each.name for each in self._executors if each.failed]

    @property
    def failure(self) -> Exception | None:
        """That of all devices, or of one's consumer or thread, if there is one."""
        if self.all_failed:
            return no_device_left()
        for executor, consumer in self._executors.items():
            if error_of(consumer) is not None and not executor.failed:
                return consumer_ended()
        if away := self.stuck_seconds:
            return UnhealthyError(
                f"the device thread has not come back from a forward for {away:.0f} seconds"
            )
        return None

    def estimate_retry_after(self, purpose: Purpose) -> int:
        """Seconds until a request of this purpose leaves its place, about; at least 1.

        They are those of the forward that runs, and of the tokens that are taken before. One that
        embeds leaves its place when its last forward begins, one that reranks when that has ended.
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
        """End the consumers and the threads; a running forward gets `seconds` to return."""
        for consumer in self._executors.values():
            consumer.cancel()
            await asyncio.wait({consumer})
        await asyncio.gather(*(executor.close(seconds) for executor in self._executors))

    def _start_worker(self, placed: PlacedModel) -> DeviceExecutor:
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
            on_lost=self._fail_what_has_no_device,
        )
        consumer = asyncio.create_task(executor.run(), name=f"{name}-consumer")
        consumer.add_done_callback(self._close_queue_without_consumers)
        self._executors[executor] = consumer
        return executor

    def _fail_what_has_no_device(self) -> None:
        """Fail the jobs that wait for a model whose devices have all failed, or are stuck."""

        def all_are_stuck(model: Model) -> bool:
            serving = (each for each in self._executors if each.serves(model))
            return all(each.watchdog.stuck_seconds for each in serving)

        self.all_failed = bool(self._defaults) and not any(map(self.serves, self._defaults))
        if self.all_failed:
            self._queue.close(no_device_left())
            return
        self._queue.fail(device_of_model_failed(), of=lambda model: not self.serves(model))
        error = UnhealthyError("the device does not come back from a forward", retry_after=30)
        self._queue.fail(error, of=all_are_stuck)

    def _close_queue_without_consumers(self, ended: "asyncio.Task[None]") -> None:
        if (error := error_of(ended)) is None:
            return
        log.error("consumer_ended", exc_info=error)
        if all(each.failed or consumer.done() for each, consumer in self._executors.items()):
            self._queue.close(consumer_ended())


def no_device_left() -> UnhealthyError:
    """The error of every request once the last device has failed."""
    message = "every device has failed, and the service must be restarted; its log says why"
    return UnhealthyError(message, retry_after=30)


def device_of_model_failed() -> UnhealthyError:
    """The error of requests whose model is only on a device that has failed."""
    message = "the device of this model has failed, and the service must be restarted to have it"
    return UnhealthyError(message, retry_after=30)


def error_of(work: "asyncio.Future[Any] | None") -> BaseException | None:
    """Why this failed; None if it succeeded, is not over or was cancelled."""
    if work is None or not work.done() or work.cancelled():
        return None
    return work.exception()

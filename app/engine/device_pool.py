"""Every device behind one queue: a thread and a consumer for each."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from app.engine.device_guard import DeviceGuard
from app.engine.device_threads import DeviceThread, DeviceThreads
from app.engine.executor import DeviceExecutor, consumer_ended
from app.engine.forward_limit import CPU_SECONDS, GPU_SECONDS, ForwardLimit
from app.engine.loaded_models import LoadedModels, Loader
from app.engine.memory import TokenBudget
from app.engine.model import Model
from app.engine.queue import JobQueue
from app.errors import DeviceFailedError, SmartEmbedderError, UnhealthyError
from app.observability.metrics import Metrics
from app.settings import Settings

log = structlog.get_logger(__name__)

# Seconds for an idle thread to end.
_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class _DeviceWorker:
    """One device: its threads, its executor and its consumer task."""

    name: str
    threads: DeviceThreads
    executor: DeviceExecutor
    consumer: "asyncio.Task[None]"


class DevicePool:
    """Serves a queue with as many devices as the loader found."""

    def __init__(self, settings: Settings, queue: JobQueue, metrics: Metrics) -> None:
        self._settings = settings
        self._queue = queue
        self._metrics = metrics
        self._first_thread = DeviceThread("device")
        self._workers: list[_DeviceWorker] = []

    async def start(self, loader: Loader) -> LoadedModels:
        """Load the models in the first device's thread, then let every device serve."""
        models = await self._first_thread.run(partial(loader, self._settings))
        if models.prepare_thread is not None:
            await self._first_thread.close(_PATIENCE)
            self._first_thread = DeviceThread("device", models.prepare_thread)
        self._workers.append(self._make_worker(self._first_thread, models, {}))
        for replica in models.replicas:
            thread = DeviceThread(f"device-{len(self._workers)}", replica.prepare_thread)
            self._workers.append(self._make_worker(thread, replica, replicas_of(models, replica)))
        return models

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
        """Whether no device is left."""
        return bool(self._workers) and len(self.failed) == len(self._workers)

    @property
    def tokens_per_second(self) -> float:
        """Measured rate of all devices together; 0 until the first forward."""
        return sum(worker.executor.rate.tokens_per_second for worker in self._workers)

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

    def _make_worker(
        self, thread: DeviceThread, models: LoadedModels, replaces: Mapping[Model, Model]
    ) -> _DeviceWorker:
        name, on_gpu = models.device.name, models.device.gpu_available
        collect = DeviceThread(f"{name}-results") if on_gpu else None
        threads = DeviceThreads(thread, collect)
        least = GPU_SECONDS if on_gpu else CPU_SECONDS
        executor = DeviceExecutor(
            self._queue,
            threads,
            TokenBudget(
                models.max_batch_tokens,
                self._settings.max_batch_sequences,
                self._settings.max_requests_in_batch,
            ),
            ForwardLimit(self._settings.gpu_process_timeout, least, models.seconds_per_token),
            self._metrics,
            guard=DeviceGuard(models.free_memory),
            replicas=replaces,
            batch_wait=self._settings.batch_wait_ms / 1000,
            on_stuck=self._fail_what_waits_for_stuck_devices,
            on_failed=partial(self._go_on_without, name),
            has_others=lambda: not self.all_failed,
        )
        consumer = asyncio.create_task(executor.run(), name=f"{name}-consumer")
        consumer.add_done_callback(self._close_queue_without_consumers)
        return _DeviceWorker(name, threads, executor, consumer)

    def _go_on_without(self, name: str, error: DeviceFailedError) -> None:
        log.error("device_failed", device=name, exc_info=error)
        if self.all_failed:
            self._queue.close(no_device_left())
        else:  # The last ones that serve may be stuck.
            self._fail_what_waits_for_stuck_devices()

    def _fail_what_waits_for_stuck_devices(self) -> None:
        """If every device that serves is stuck, fail the jobs that wait."""
        serving = [each.executor for each in self._workers if not each.executor.failed]
        if all(executor.stuck_seconds for executor in serving):
            self._queue.fail(
                UnhealthyError("the device does not come back from a forward", retry_after=30)
            )

    def _close_queue_without_consumers(self, ended: "asyncio.Task[None]") -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is None:
            return
        log.error("consumer_ended", exc_info=error)
        if self._all_ended:
            self._queue.close(consumer_ended())

    @property
    def _all_ended(self) -> bool:
        return all(each.executor.failed or each.consumer.done() for each in self._workers)


def no_device_left() -> UnhealthyError:
    """What every caller is told once the last device has failed."""
    message = "every device has failed, and the service must be restarted; its log says why"
    return UnhealthyError(message, retry_after=30)


def replicas_of(models: LoadedModels, replica: LoadedModels) -> dict[Model, Model]:
    """Maps each model of the first device to its replica."""
    pairs = zip(models.each, replica.each, strict=True)
    return dict(pairs)

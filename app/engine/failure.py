"""The faults of an engine that only a restart repairs."""

import asyncio

from app.engine.device_pool import DevicePool, no_device_left
from app.engine.executor import consumer_ended
from app.engine.loaded_models import LoadedModels
from app.errors import UnhealthyError


def find_failure(
    loading: "asyncio.Future[LoadedModels] | None",
    devices: DevicePool,
    changed_file: str | None,
    *,
    closing: bool,
) -> Exception | None:
    """The first that there is: of the start, a device, a consumer, or a file of the models."""
    cause = start_failure(loading)
    if cause is not None:
        # Its message may name folders of this machine: it is the cause, and in the log.
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
    return None if changed_file is None else UnhealthyError(changed_file)


def start_failure(loading: "asyncio.Future[LoadedModels] | None") -> BaseException | None:
    """Why the models could not be loaded; None where they were, or still may be."""
    if loading is None or not loading.done() or loading.cancelled():
        return None
    return loading.exception()

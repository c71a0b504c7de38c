"""The failures of an engine that need a restart."""

import asyncio

from app.engine.devices.device_pool import DevicePool, no_device_left
from app.engine.devices.executor import consumer_ended
from app.engine.loaded_models import LoadedModels
from app.errors import UnhealthyError


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

"""What every endpoint that does work needs: a time limit for the whole request."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from app.errors import InferenceTimeoutError

Result = TypeVar("Result")


async def within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; raises `InferenceTimeoutError` after `seconds`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise InferenceTimeoutError(f"the request took longer than {seconds:g} seconds") from None

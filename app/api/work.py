"""What every endpoint that does work needs: an end to it, when time is up or the client is gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from app.errors import ClientGoneError, InferenceTimeoutError

Result = TypeVar("Result")


async def within(seconds: float, request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, whose request has been read whole.

    Raises `InferenceTimeoutError` after `seconds`, and `ClientGoneError` as soon as the client has
    closed its connection; either way the work is cancelled and leaves the queue.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError("the client left before its request was answered")
        raise InferenceTimeoutError(f"the request took longer than {seconds:g} seconds")
    finally:
        gone.cancel()
        await _end(task)


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancel what still runs, and let it put its affairs in order."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})

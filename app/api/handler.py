"""What an endpoint that does work needs: an end in time or when its client leaves, and a note."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import Scope

from app.api.context import context_of
from app.api.rendering import timings_as_json
from app.api.service import Service
from app.engine.types import EmbeddingResult, RerankResult
from app.errors import ClientGoneError, InferenceTimeoutError
from app.observability.tracing import Stage

Result = TypeVar("Result")


async def within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; raises `InferenceTimeoutError` after `seconds`.

    The whole request is meant, from the first byte of its body to its rendered answer: a client
    that sends its body too slowly is told the same (504) as one whose work takes too long.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise InferenceTimeoutError(
            f"the request took longer than {seconds:g} seconds (REQUEST_TIMEOUT): send fewer texts"
        ) from None


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, whose request has been read whole.

    Raises `ClientGoneError` as soon as the client closes its connection; the work is cancelled
    then, and leaves the queue.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client left before its request was answered")
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


async def rendered(
    request: Request, service: Service, call: Callable[[], Result], estimated_bytes: int
) -> Result:
    """The answer that `call` renders."""
    began = time.perf_counter()
    result = await service.render(call, estimated_bytes)
    note_stages(request.scope, Stage("render", began, time.perf_counter()))
    return result


def note_stages(scope: Scope, *stages: Stage) -> None:
    """Leave stages for the request's trace."""
    context_of(scope).stages.extend(stages)


def note_work(scope: Scope, result: EmbeddingResult | RerankResult, **counts: int) -> None:
    """Leave numbers for the request's log line and its trace: texts, tokens, and each stage."""
    timings = timings_as_json(result.timings)
    stages = {f"{stage}_ms": timings[stage] for stage in ("tokenize", "queue", "inference")}
    context_of(scope).counts = counts | {"tokens": result.tokens} | stages
    note_stages(scope, *result.timings.stages)

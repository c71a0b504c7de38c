"""What every endpoint that does work needs: a time limit, and a note of the work for the log."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Scope

from app.api.rendering import timings_as_json
from app.errors import InferenceTimeoutError
from app.jobs import EmbeddingResult, RerankResult

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
        raise InferenceTimeoutError(f"the request took longer than {seconds:g} seconds") from None


def note_work(scope: Scope, result: EmbeddingResult | RerankResult, **counts: int) -> None:
    """Leave numbers for the request's log line: texts, tokens, and milliseconds in each stage."""
    timings = timings_as_json(result.timings)
    stages = {f"{stage}_ms": timings[stage] for stage in ("tokenize", "queue", "inference")}
    scope["state"]["work"] = counts | {"tokens": result.tokens} | stages

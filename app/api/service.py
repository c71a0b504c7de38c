"""What a request handler may reach: one object, made with the app."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from app.engine import Engine
from app.observability.metrics import Metrics
from app.server.drain import Drain
from app.settings import Settings

# Three milliseconds of the event loop.
LARGE_RESPONSE_BYTES = 100_000
Rendered = TypeVar("Rendered")


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of one running service."""

    settings: Settings
    metrics: Metrics
    engine: Engine
    drain: Drain
    render_threads: Executor

    async def render(self, call: Callable[[], Rendered], estimated_bytes: int) -> Rendered:
        """Run `call` here, or off the event loop where its result will be large."""
        if estimated_bytes < LARGE_RESPONSE_BYTES:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self.render_threads, call)


async def get_service(request: Request) -> Service:
    """The service behind this app."""
    service: Service = request.app.state.service
    return service


# Checks nothing: it puts the lock on the operation in the API's description. See RequireToken.
BEARER_NAME = "HTTPBearer"
BEARER = Security(
    HTTPBearer(
        auto_error=False,
        scheme_name=BEARER_NAME,
        description="A token of API_TOKEN or API_TOKENS_FILE, where one is set",
    )
)
ServiceDep = Annotated[Service, Depends(get_service)]

"""What a request handler may reach: one object, made with the app."""

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from app.engine import Engine
from app.metrics import Metrics
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of one running service."""

    settings: Settings
    metrics: Metrics
    engine: Engine
    render_threads: Executor


async def get_service(request: Request) -> Service:
    """The service behind this app."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]

"""Runs the service in this process, with given models."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from httpx2 import ASGITransport, AsyncClient

from app.main import create_app
from app.service import Service
from smart_embedder.interface import LoadedModels
from tests.smart_embedder.fakes import NO_MORE, loading, settings_of


@asynccontextmanager
async def served(
    default: LoadedModels, /, loader: Any = NO_MORE, **settings: Any
) -> AsyncIterator[tuple[Service, AsyncClient]]:
    """Yield a service that has loaded `default`, and a client of it; nothing else is started."""
    chosen = settings_of(default, **{"api_token": None} | settings)
    app = create_app(chosen, loader=loading(default, loader=loader))
    service: Service = app.state.service
    await service.engine.start()
    try:
        transport = ASGITransport(app)
        async with AsyncClient(transport=transport, base_url="http://service") as client:
            yield service, client
    finally:
        await service.engine.close()
        service.render_threads.shutdown()

"""The service in this process, with models at hand."""

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
    """A service that has loaded `default`, without its start's other work, and a client of it."""
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

"""The service in this process, with models at hand."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from httpx2 import ASGITransport, AsyncClient

from smart_embedder.api.handler import Service
from smart_embedder.engine.model import LoadedModels
from smart_embedder.main import create_app
from smart_embedder.settings import Settings


@asynccontextmanager
async def served(
    default: LoadedModels, /, **settings: Any
) -> AsyncIterator[tuple[Service, AsyncClient]]:
    """A service that has loaded `default`, without its start's other work, and a client of it."""
    app = create_app(Settings(**{"api_token": None} | settings), loader=lambda _: default)
    service: Service = app.state.service
    await service.engine.start()
    try:
        transport = ASGITransport(app)
        async with AsyncClient(transport=transport, base_url="http://service") as client:
            yield service, client
    finally:
        await service.engine.close()
        service.render_threads.shutdown()

"""Both clients behind one interface, and a server whose queue and device can be blocked."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from smart_embedder_client import AsyncClient, Client

from tests.clients.conftest import TOKEN
from tests.support.server import RunningServer


class FromThreads:
    """An AsyncClient with synchronous methods, so that one test covers both clients."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            return self._runner.run(_all_of(getattr(self._client, name)(*arguments, **options)))

        return call


async def _all_of(result: Any) -> Any:
    """Await the result of a method, or all records of a stream."""
    if isinstance(result, AsyncIterator):
        return [record async for record in result]
    return await result


@contextmanager
def sync_client(url: str, *, hooks: Any = None, transport: Any = None, **options: Any):
    http = httpx.Client(event_hooks=hooks, transport=transport)
    with http, Client(url, http=http, **options) as client:
        yield client


@contextmanager
def async_client(url: str, *, hooks: Any = None, transport: Any = None, **options: Any):
    hooks = {
        event: [_awaitable(hook) for hook in functions]
        for event, functions in (hooks or {}).items()
    }
    with asyncio.Runner() as runner:
        http = httpx.AsyncClient(event_hooks=hooks, transport=transport)
        try:
            yield FromThreads(AsyncClient(url, http=http, **options), runner)
        finally:
            runner.run(http.aclose())


def _awaitable(hook):
    async def call(event) -> None:
        await asyncio.to_thread(hook, event)

    return call


@pytest.fixture(params=[sync_client, async_client], ids=["threads", "asyncio"])
def connect(request: pytest.FixtureRequest):
    """Connects either client to an address."""
    return request.param


@pytest.fixture
def client(server: RunningServer):
    """Only the synchronous client: sending is the sole difference."""
    with Client(server.url) as client:
        yield client


@pytest.fixture
def closed_port():
    """The address of a bound port on which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="module")
def busy_server(serve, tiny_reranker: Path, hold: Path):
    """A server with a token, whose queue holds one request."""
    settings = {
        "RERANKER_MODEL": str(tiny_reranker),
        "API_TOKEN": TOKEN,
        "MAX_QUEUE_SIZE": "1",
        "HOLD": str(hold),
    }
    with serve("tests.faults.faulty_server", **settings) as running:
        yield running

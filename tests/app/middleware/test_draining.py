"""Requests during a graceful shutdown."""

import asyncio
from typing import Any

import pytest

from app.middleware.draining import Drain, RefuseWhileDraining
from tests.app.middleware.exchange import Inner, exchange, header
from tests.support.skipped_time import in_skipped_time, run_ready


@pytest.mark.parametrize(
    ("method", "path", "refused"),
    [
        ("POST", "/embeddings/", True),
        ("POST", "/rerank", True),
        ("GET", "/health", False),
        ("GET", "/embeddings/", False),
        ("POST", "/nowhere", False),
    ],
)
async def test_once_the_drain_has_begun_only_work_is_503(method, path, refused) -> None:
    drain, inner = Drain(), Inner()
    app = RefuseWhileDraining(inner, drain)
    drain.announced = True
    _, sent = await exchange(app, method=method, path=path)
    assert sent[0]["status"] == 200, "requests pass during SHUTDOWN_DELAY"
    inner.scope = None
    drain.begin()
    context, sent = await exchange(app, b"a", b"b", method=method, path=path)
    assert (sent[0]["status"] == 503) == refused
    assert inner.called != refused
    if refused:
        assert context.error_code == "draining"
        assert header(sent, b"retry-after") == b"5"


@in_skipped_time
async def test_the_drain_waits_for_accepted_work_and_not_for_health_checks() -> None:
    drain, go = Drain(), asyncio.Event()

    async def work(_scope: Any, _receive: Any, _send: Any) -> None:
        await go.wait()

    app = RefuseWhileDraining(work, drain)
    accepted = asyncio.create_task(exchange(app))
    await run_ready()
    waiting = asyncio.create_task(drain.wait_for_none())
    await run_ready()
    assert not waiting.done()
    go.set()
    await asyncio.gather(waiting, accepted)
    go.clear()
    health_check = asyncio.create_task(exchange(app, method="GET", path="/health"))
    await run_ready()
    async with asyncio.timeout(1):
        await drain.wait_for_none()
    health_check.cancel()


async def test_responses_have_connection_close_once_the_drain_has_begun() -> None:
    drain = Drain()

    async def work(_scope: Any, _receive: Any, send: Any) -> None:
        drain.begin()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    for app, path in ((Inner(), "/health"), (work, "/rerank"), (Inner(), "/health")):
        begun = drain.begun
        _, sent = await exchange(RefuseWhileDraining(app, drain), path=path)
        assert header(sent, b"connection") == (b"close" if begun or app is work else None)

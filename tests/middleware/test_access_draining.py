"""Who is refused during a graceful shutdown, and when."""

import asyncio
from typing import Any

import pytest

from smart_embedder.middleware.access import RefuseWhileDraining
from smart_embedder.middleware.observe import ProvideContext
from smart_embedder.server.drain import Drain
from tests.middleware.exchange import Inner, exchange, header
from tests.support.paths import PATHS
from tests.support.skipped_time import in_skipped_time, now, turns


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
async def test_once_it_has_begun_work_is_refused_and_nothing_else(method, path, refused) -> None:
    drain, inner = Drain(), Inner()
    app = RefuseWhileDraining(inner, drain)
    drain.announced = True
    _, sent = await exchange(app, method=method, path=path)
    assert sent[0]["status"] == 200, "with SHUTDOWN_DELAY it is served until the drain begins"
    inner.scope = None
    drain.begin()
    context, sent = await exchange(app, b"a", b"b", method=method, path=path)
    assert (sent[0]["status"] == 503) == refused
    assert inner.called != refused
    if refused:
        assert context.error_code == "draining"
        assert header(sent, b"retry-after") == b"5"
        assert context.bytes_in == 2, "many clients read no answer before they have sent all"


@in_skipped_time
async def test_the_shutdown_waits_for_the_work_that_was_accepted() -> None:
    drain, go = Drain(), asyncio.Event()

    async def work(_scope: Any, _receive: Any, _send: Any) -> None:
        await go.wait()

    app = RefuseWhileDraining(work, drain)
    accepted = asyncio.create_task(exchange(app))
    await turns()
    assert not await drain.wait(1)
    go.set()
    assert await drain.wait(1)
    await accepted
    go.clear()
    checked = asyncio.create_task(exchange(app, method="GET", path="/health"))
    await turns()
    assert await drain.wait(1), "nobody waits for a health check"
    checked.cancel()


@in_skipped_time
async def test_a_body_that_does_not_come_delays_the_refusal_for_a_moment() -> None:
    drain = Drain()
    drain.begin()

    async def refused(headers: list[tuple[bytes, bytes]]) -> float:
        began, sent = now(), list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/rerank", "headers": headers}
        app = ProvideContext(RefuseWhileDraining(Inner(), drain), [], PATHS)
        await app(scope | {"client": None}, asyncio.Event().wait, send)
        assert sent[0]["status"] == 503
        return now() - began

    assert await refused([]) == pytest.approx(2, abs=0.1)
    # It sends its body only when it is told to.
    assert await refused([(b"expect", b"100-continue")]) == 0

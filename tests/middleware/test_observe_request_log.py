"""One line for each request, whatever becomes of it."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from smart_embedder.api.context import context_of
from smart_embedder.middleware import observe
from smart_embedder.middleware.observe import LogRequests
from tests.middleware.exchange import Inner, exchange


def ending(status: int | None, error: Exception | None = None) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        context_of(scope).counts["sentences"] = 3
        await receive()
        if status is not None:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"abcd"})
        if error is not None:
            raise error

    return app


@pytest.mark.parametrize(
    ("method", "status", "level"),
    [
        ("POST", 200, "info"),
        ("POST", 500, "info"),
        ("GET", 200, "debug"),
        ("HEAD", 200, "debug"),
        ("GET", 503, "debug"),
        ("GET", 399, "debug"),
        ("GET", 400, "info"),
        ("GET", 499, "info"),
        ("GET", 500, "debug"),
    ],
)
async def test_checks_and_scrapes_are_shown_only_where_their_sender_made_a_mistake(
    method, status, level
) -> None:
    with capture_logs() as log:
        await exchange(LogRequests(ending(status)), b"xy", method=method)
    (line,) = log
    assert (line["event"], line["log_level"], line["status"]) == ("request", level, status)


async def test_the_line_holds_what_is_known_and_no_text(monkeypatch) -> None:
    times = iter([100.0, 100.2504])
    monkeypatch.setattr(observe.time, "perf_counter", lambda: next(times))
    with capture_logs() as log:
        context, _ = await exchange(LogRequests(ending(200)), b"secret", path="/rerank")
    (line,) = log
    assert line == {
        "event": "request",
        "log_level": "info",
        "request_id": context.request_id,
        "method": "POST",
        "path": "/rerank",
        "route": None,
        "client": None,
        "client_address": "192.0.2.1",
        "status": 200,
        "code": None,
        "bytes_in": 6,
        "bytes_out": 4,
        "ms": 250.4,
        "sentences": 3,
    }


@pytest.mark.parametrize(("begun", "answers"), [(None, [500]), (200, [200])])
async def test_an_error_that_nobody_foresaw_is_answered_unless_an_answer_has_begun(begun, answers):
    with capture_logs() as log:
        app = LogRequests(ending(begun, ZeroDivisionError("secret")))
        context, sent = await exchange(app)
    assert [each["status"] for each in sent if "status" in each] == answers
    assert [each["event"] for each in log] == ["request_failed", "request"]
    assert log[0]["request_id"] == context.request_id
    assert log[1]["code"] == (None if begun else "internal_error")
    assert b"secret" not in sent[-1]["body"]


async def test_what_ends_the_process_is_no_error_of_a_request_but_is_logged() -> None:
    with capture_logs() as log, pytest.raises(KeyboardInterrupt):
        await exchange(LogRequests(ending(None, KeyboardInterrupt())))  # type: ignore[arg-type]
    assert [each["event"] for each in log] == ["request"]


async def test_what_is_no_http_is_not_logged() -> None:
    inner = Inner()

    async def receive() -> dict[str, Any]:
        return {}

    async def send(_message: Any) -> None:
        pass

    with capture_logs() as log:
        await LogRequests(inner)({"type": "lifespan"}, receive, send)
    assert (inner.called, log) == (True, [])

"""The context of a request, and its log line."""

from ipaddress import ip_network
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from app.context import NATIVE_EMBEDDINGS, RERANK, context_of
from app.middleware import request_log
from app.middleware.request_log import LogRequests
from tests.app.middleware.exchange import Inner, exchange, header

PROXIES = [ip_network("::ffff:10.0.0.0/104")]


@pytest.mark.parametrize(
    ("method", "path", "endpoint", "route"),
    [
        ("POST", "/embeddings", NATIVE_EMBEDDINGS, "/embeddings/"),
        ("POST", "/embeddings//\n", NATIVE_EMBEDDINGS, "/embeddings/"),
        ("POST", "//v1//rerank", RERANK, "/v1/rerank"),
        ("GET", "/rerank", None, "/rerank"),
        ("GET", "//", None, "/"),
        ("POST", "/nowhere/", None, "/nowhere"),
    ],
)
async def test_an_endpoint_is_found_by_any_spelling_of_its_path(method, path, endpoint, route):
    inner = Inner()
    context, _ = await exchange(inner, method=method, path=path)
    assert (context.endpoint, context.route) == (endpoint, route)
    assert inner.scope["path"] == route
    assert context.path == path.replace("\n", "\\n")


@pytest.mark.parametrize(
    ("sent_id", "kept"),
    [(b"mine-1", True), (b"a" * 128, True), (b"a" * 129, False), (b"a b", False), (b"", False)],
)
async def test_a_printable_request_id_of_the_client_is_kept(sent_id: bytes, kept: bool) -> None:
    context, sent = await exchange(Inner(), headers=[(b"x-request-id", sent_id)])
    assert (context.request_id.encode() == sent_id) == kept
    assert header(sent, b"x-request-id") == context.request_id.encode()
    assert context.request_id


@pytest.mark.parametrize(
    ("peer", "address"),
    [("10.0.0.7", "198.51.100.1"), ("192.0.2.9", "192.0.2.9"), ("", "unknown")],
)
async def test_only_a_trusted_proxy_sets_the_clients_address_and_the_prefix(peer, address) -> None:
    headers = [
        (b"x-forwarded-for", b"203.0.113.5"),
        (b"x-forwarded-for", b"198.51.100.1"),
        (b"x-forwarded-prefix", b"/embed/"),
    ]
    inner = Inner()
    context, _ = await exchange(inner, headers=headers, peer=peer, proxies=PROXIES)
    trusted = peer.startswith("10.")
    assert context.client == f"address:{address}"
    assert context.prefix == ("/embed" if trusted else "")
    assert inner.scope["path"] == f"{context.prefix}/embeddings/"
    assert inner.scope["root_path"] == context.prefix


@pytest.mark.parametrize(
    ("root", "path", "route"),
    [
        ("/base", "/base/rerank", "/rerank"),
        ("/base", "/rerank", "/rerank"),
        ("/base", "/base", "/"),
        ("/base", "/basement", "/basement"),
    ],
)
async def test_the_root_path_of_the_server_is_removed_once(root, path, route) -> None:
    inner = Inner()
    context, _ = await exchange(inner, path=path, root_path=root)
    assert (context.route, context.prefix) == (route, "/base")
    assert inner.scope["path"] == f"/base{route}"


async def test_the_query_string_moves_to_the_context_and_cookies_are_dropped() -> None:
    inner = Inner()
    headers = [(b"cookie", b"a=b"), (b"accept", b"*/*"), (b"cookie", b"c")]
    context, sent = await exchange(inner, b"abc", b"", b"de", query_string=b"a=b", headers=headers)
    assert (context.query, inner.scope["query_string"]) == (b"a=b", b"")
    assert inner.scope["headers"] == [(b"accept", b"*/*")]
    assert (context.status, context.bytes_in, context.bytes_out, len(sent)) == (200, 5, 2, 2)


# The line of a request.


def app_of(status: int | None, error: Exception | None = None) -> Any:
    """An app that sends a response with `status`, then raises `error`."""

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
        ("POST", 500, "info"),
        ("GET", 200, "debug"),
        ("GET", 399, "debug"),
        ("GET", 400, "info"),
        ("GET", 499, "info"),
        ("GET", 500, "debug"),
    ],
)
async def test_health_checks_and_scrapes_are_logged_at_debug_unless_they_are_4xx(
    method, status, level
) -> None:
    with capture_logs() as log:
        await exchange(LogRequests(app_of(status)), b"xy", method=method)
    (line,) = log
    assert (line["event"], line["log_level"], line["status"]) == ("request", level, status)


async def test_the_log_line_begins_with_the_status_and_holds_no_text(
    monkeypatch,
) -> None:
    times = iter([100.0, 100.2504])
    monkeypatch.setattr(request_log.time, "perf_counter", lambda: next(times))
    with capture_logs() as log:
        route = SimpleNamespace(path="/rerank")
        context, _ = await exchange(
            LogRequests(app_of(200)), b"secret", path="/rerank", route=route
        )
    (line,) = log
    assert list(line.items()) == [
        ("status", 200),
        ("method", "POST"),
        ("route", "/rerank"),
        ("ms", 250.4),
        ("client_address", "192.0.2.1"),
        ("path", "/rerank"),
        ("bytes_in", 6),
        ("bytes_out", 4),
        ("sentences", 3),
        ("request_id", context.request_id),
        ("event", "request"),
        ("log_level", "info"),
    ]


@pytest.mark.parametrize(("started", "statuses"), [(None, [500]), (200, [200])])
async def test_an_unexpected_error_is_500_unless_a_response_has_started(started, statuses):
    with capture_logs() as log:
        app = LogRequests(app_of(started, ZeroDivisionError("secret")))
        context, sent = await exchange(app)
    assert [message["status"] for message in sent if "status" in message] == statuses
    assert [line["event"] for line in log] == ["request_failed", "request"]
    assert log[0]["request_id"] == context.request_id
    assert log[1].get("code") == (None if started else "internal_error")
    assert b"secret" not in sent[-1]["body"]

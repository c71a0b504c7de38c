"""Requests of web pages: pages of this service, of allowed origins and of others."""

import orjson
import pytest

from app.middleware.origin import CheckOrigin
from tests.app.middleware.exchange import Inner, exchange, header

SITE = "https://app.example"


@pytest.mark.parametrize(
    ("origin", "host", "passes"),
    [
        (None, "localhost:8000", True),
        ("http://LOCALHOST:8000", "localhost:8000", True),
        ("https://localhost", "localhost:443", True),
        ("http://localhost", "localhost:80", True),
        # Behind a proxy that ends TLS.
        ("https://embed.example", "embed.example", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost", "localhost:8000", False),
        ("http://other:8000", "localhost:8000", False),
        ("http://localhost.other:8000", "localhost:8000", False),
        ("null", "localhost:8000", False),
        ("http://a:99999", "localhost:8000", False),
        ("http://[::1", "[::1", False),
        (SITE, "localhost:8000", True),
        (f"{SITE}:444", "localhost:8000", False),
        ("http://app.example", "localhost:8000", False),
    ],
)
async def test_an_origin_passes_if_it_is_the_services_own_or_allowed(origin, host, passes) -> None:
    headers = [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    for method in ("GET", "POST"):
        inner = Inner()
        context, sent = await exchange(CheckOrigin(inner, [SITE]), headers=headers, method=method)
        assert inner.called == passes
        assert sent[0]["status"] == (200 if passes else 403)
        assert context.error_code == (None if passes else "foreign_origin")
        allowed = header(sent, b"access-control-allow-origin")
        assert (allowed == SITE.encode()) == (origin == SITE)


@pytest.mark.parametrize(
    ("origin", "passes"),
    [
        ("app://obsidian.md", True),
        ("vscode-webview://1r5k8q", True),
        ("app://other", False),
        ("https://vscode-webview://", False),
        ("http://vscode-webview", False),
    ],
)
@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
async def test_origins_of_applications_pass_by_their_name_or_scheme(origin, passes, method) -> None:
    headers = [(b"origin", origin.encode()), (b"host", b"localhost")]
    headers += [(b"access-control-request-method", b"POST")] if method == "OPTIONS" else []
    allowed = ["app://obsidian.md", "vscode-webview://"]
    _, sent = await exchange(CheckOrigin(Inner(), allowed), headers=headers, method=method)
    assert sent[0]["status"] == (200 if passes else 403)
    shown = header(sent, b"access-control-allow-origin")
    assert shown == (origin.encode() if passes else None)


@pytest.mark.parametrize(
    ("allowed", "more", "status", "shown"),
    [
        pytest.param([], [], 403, None, id="foreign"),
        pytest.param([], [(b"sec-fetch-site", b"same-origin")], 200, None, id="same-origin"),
        pytest.param(["*"], [], 200, b"*", id="any is allowed"),
        pytest.param([SITE], [(b"origin", SITE.encode())], 403, None, id="two headers"),
    ],
)
async def test_a_foreign_origin_is_403_unless_all_are_allowed_or_the_browser_says_same_origin(
    allowed, more, status, shown
) -> None:
    foreign = [(b"host", b"internal"), (b"origin", b"https://public.example")]
    _, sent = await exchange(CheckOrigin(Inner(), allowed), headers=[*foreign, *more])
    assert sent[0]["status"] == status
    assert header(sent, b"access-control-allow-origin") == shown
    if status == 403:
        named = "https://public.example" + (f", {SITE}" if SITE in allowed else "")
        detail = orjson.loads(sent[1]["body"])["detail"]
        assert detail.startswith(f"A web page of {named} may not call this service: CORS_ORIGINS")


async def test_cors_allows_any_request_header_and_exposes_ids_to_an_allowed_page() -> None:
    inner, origin = Inner(), (b"origin", SITE.encode())
    preflight = [
        origin,
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", b"authorization,x-request-id"),
        (b"access-control-request-private-network", b"true"),
    ]
    _, sent = await exchange(CheckOrigin(inner, [SITE]), method="OPTIONS", headers=preflight)
    assert (sent[0]["status"], inner.called) == (200, False)
    assert b"POST" in header(sent, b"access-control-allow-methods")
    assert header(sent, b"access-control-allow-headers") == b"authorization,x-request-id"
    assert header(sent, b"access-control-allow-private-network") == b"true"
    _, sent = await exchange(CheckOrigin(inner, [SITE]), headers=[origin])
    exposed = header(sent, b"access-control-expose-headers")
    assert b"X-Request-ID" in exposed
    assert b"Vector-Space" in exposed

"""Pages of other sites may not ask."""

import orjson
import pytest

from smart_embedder.middleware.access import CheckOrigin
from tests.middleware.exchange import Inner, exchange, header

SITE = "https://app.example"


@pytest.mark.parametrize(
    ("origin", "host", "passes"),
    [
        (None, "localhost:8000", True),
        ("http://localhost:8000", "localhost:8000", True),
        ("http://LOCALHOST:8000", "localhost:8000", True),
        ("https://localhost", "localhost:443", True),
        ("http://localhost", "localhost:80", True),
        # Behind a proxy that ends TLS.
        ("https://embed.example", "embed.example", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:9000", "localhost:8000", False),
        ("http://localhost", "localhost:8000", False),
        ("http://other:8000", "localhost:8000", False),
        ("http://localhost.other:8000", "localhost:8000", False),
        ("null", "localhost:8000", False),
        ("null", "", False),
        ("http://a:99999", "localhost:8000", False),
        ("http://[::1", "[::1", False),
        (SITE, "localhost:8000", True),
        (f"{SITE}:444", "localhost:8000", False),
        ("http://app.example", "localhost:8000", False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_page_may_ask_if_it_came_from_here_or_is_named(origin, host, passes, method):
    inner, headers = Inner(), [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    context, sent = await exchange(CheckOrigin(inner, [SITE]), headers=headers, method=method)
    assert inner.called == passes
    assert sent[0]["status"] == (200 if passes else 403)
    assert context.error_code == (None if passes else "foreign_origin")
    allowed = header(sent, b"access-control-allow-origin")
    assert (allowed == SITE.encode()) == (origin == SITE)


async def test_several_origins_are_none_of_the_allowed_ones() -> None:
    headers = [
        (b"host", b"localhost"),
        (b"origin", SITE.encode()),
        (b"origin", b"http://localhost"),
    ]
    _, sent = await exchange(CheckOrigin(Inner(), [SITE]), headers=headers)
    assert sent[0]["status"] == 403
    detail = orjson.loads(sent[1]["body"])["detail"]
    assert detail.startswith(f"A web page of {SITE}, http://localhost may not ask: CORS_ORIGINS")


async def test_a_browser_that_says_that_the_page_is_ours_is_believed_and_any_may_be_allowed():
    strange = [(b"host", b"internal"), (b"origin", b"https://public.example")]
    same = (b"sec-fetch-site", b"same-origin")
    for allowed, more, status in (([], [], 403), ([], [same], 200), (["*"], [], 200)):
        _, sent = await exchange(CheckOrigin(Inner(), allowed), headers=[*strange, *more])
        assert sent[0]["status"] == status
        shown = header(sent, b"access-control-allow-origin")
        assert shown == (b"*" if allowed else None)


async def test_a_page_that_is_allowed_may_send_any_header_and_read_the_ids() -> None:
    asks = [
        (b"origin", SITE.encode()),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", b"authorization,x-request-id"),
        (b"access-control-request-private-network", b"true"),
    ]
    inner = Inner()
    app = CheckOrigin(inner, [SITE])
    _, sent = await exchange(app, method="OPTIONS", headers=asks)
    assert (sent[0]["status"], inner.called) == (200, False)
    assert b"POST" in header(sent, b"access-control-allow-methods")
    assert header(sent, b"access-control-allow-headers") == b"authorization,x-request-id"
    assert header(sent, b"access-control-allow-private-network") == b"true"
    _, sent = await exchange(app, headers=asks[:1])
    assert b"X-Request-ID" in header(sent, b"access-control-expose-headers")

"""Where a token is asked for, and what is known of who sent it."""

from typing import Any

import pytest

from smart_embedder.access.rate_limit import MemoryBuckets
from smart_embedder.access.tokens import ApiTokens
from smart_embedder.middleware.access import LimitRate, RateLimiter, RequireToken
from tests.middleware.exchange import Inner, exchange, header


def checked(
    inner: Any, token: str | None = "own", *, protect_metrics: bool = False, burst: int = 100
) -> Any:
    limiter = RateLimiter(MemoryBuckets(1, burst), 1, burst)
    return RequireToken(inner, ApiTokens(token, None), limiter, protect_metrics=protect_metrics)


PUBLIC = [
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/health/ready"),
    ("GET", "/ui"),
    ("GET", "/ui/logic.js"),
    ("GET", "/docs"),
    ("GET", "/redoc"),
    ("GET", "/openapi.json"),
    ("GET", "/static/docs/a.js"),
    ("GET", "/ping"),
    ("GET", "/models/a/health"),
]
PROTECTED = [
    ("POST", "/"),
    ("POST", "/embeddings/"),
    ("GET", "/embeddings/"),
    ("GET", "/healthy"),
    ("GET", "/uix"),
    ("GET", "/docs.html"),
    ("GET", "/static"),
    ("GET", "/v1/models"),
    ("GET", "/nowhere"),
    ("GET", "/pingpong"),
    ("POST", "/models/a/rerank"),
]
METRICS = [("GET", "/stats"), ("GET", "/metrics")]


@pytest.mark.parametrize(("method", "path"), [*PUBLIC, *PROTECTED, *METRICS])
@pytest.mark.parametrize("protect_metrics", [False, True])
async def test_what_is_no_public_page_needs_the_token(method, path, protect_metrics) -> None:
    public = [*PUBLIC, *([] if protect_metrics else METRICS)]
    for sent_token, known in ((None, False), (b"Bearer own", True), (b"bearer  own ", True)):
        inner = Inner()
        headers = [] if sent_token is None else [(b"authorization", sent_token)]
        app = checked(inner, protect_metrics=protect_metrics)
        context, sent = await exchange(app, method=method, path=path, headers=headers)
        passes = known or (method, path) in public
        assert inner.called == passes
        assert sent[0]["status"] == (200 if passes else 401)
        if not passes:
            assert header(sent, b"www-authenticate") == b"Bearer"
            assert context.error_code == "unauthorized"


async def test_without_a_token_in_the_settings_nothing_is_asked() -> None:
    inner = Inner()
    context, sent = await exchange(checked(inner, None), headers=[(b"authorization", b"Bearer x")])
    assert (sent[0]["status"], context.token_name) == (200, None)


@pytest.mark.parametrize(
    ("value", "passes"),
    [
        (b"Bearer own", True),
        (b"BEARER own", True),
        (b"own", True),
        (b"Bearer own more", False),
        (b"Basic own", False),
        (b"Bearer", False),
        (b"", False),
        (b"Bearer other", False),
    ],
)
async def test_a_token_is_read_after_bearer_or_alone(value: bytes, passes: bool) -> None:
    context, sent = await exchange(checked(Inner()), headers=[(b"authorization", value)])
    assert (sent[0]["status"] == 200) == passes
    assert context.token_name == ("default" if passes else None)


async def test_what_is_no_http_needs_none() -> None:
    inner = Inner()

    async def receive() -> dict[str, Any]:
        return {}

    async def send(_message: Any) -> None:
        pass

    await checked(inner)({"type": "lifespan"}, receive, send)
    assert inner.called


async def test_who_has_used_up_its_work_has_no_tries_for_a_token_either() -> None:
    """And the other way round: the longer of both waits is told."""
    inner = Inner()
    limited = checked(inner, burst=1)
    limiter = limited._limiter
    context, _ = await exchange(LimitRate(inner, limiter))
    assert context.error_code is None
    context, sent = await exchange(limited, headers=[(b"authorization", b"Bearer wrong")])
    assert (sent[0]["status"], context.error_code) == (429, "rate_limited")
    assert header(sent, b"retry-after") == b"60"


@pytest.mark.parametrize(
    ("method", "path", "default", "named"),
    [
        ("GET", "/v1/models", 429, 429),
        ("GET", "/nowhere", 429, 429),
        # What an operator's programs ask for again and again.
        ("GET", "/metrics", 429, 200),
        ("GET", "/stats", 429, 200),
        # Work is counted by itself.
        ("POST", "/rerank", 200, 200),
    ],
)
async def test_who_has_guessed_too_often_is_not_told_that_a_token_is_right(
    method, path, default, named, tmp_path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ops:operators-token\n")
    limiter = RateLimiter(MemoryBuckets(1, 2), 1, 2)
    limited = RequireToken(Inner(), ApiTokens("own", tokens), limiter, protect_metrics=True)
    before = [b"Bearer own", b"Bearer operators-token"]
    expected = [200, 200, 401, 401, 429, default, named]
    statuses = []
    for token in (*before, *[b"Bearer wrong"] * 3, *before):
        headers = [(b"authorization", token)]
        _, sent = await exchange(limited, method=method, path=path, headers=headers)
        statuses.append(sent[0]["status"])
    assert statuses == expected

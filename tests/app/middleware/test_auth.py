"""Access tokens and rate limits of requests, with real token buckets."""

from ipaddress import ip_network
from typing import Any

import orjson
import pytest

from app.middleware.auth import ApiTokens, RequireTokenAndLimitRate
from app.middleware.rate_limit import TokenBuckets
from tests.app.middleware.exchange import Inner, exchange, header

PROXY = ip_network("10.0.0.0/8")
GUESS = b"Bearer guess"


@pytest.fixture
def tokens(tmp_path) -> ApiTokens:
    (tmp_path / "tokens").write_text("alice:alices\nbob:bobs\n")
    return ApiTokens("own", tmp_path / "tokens")


class App:
    """An app behind the middleware: each client may send `burst` requests."""

    def __init__(
        self, tokens: ApiTokens | None = None, *, burst: int = 1, protect_metrics: bool = True
    ) -> None:
        self.inner = Inner()
        self.middleware = RequireTokenAndLimitRate(
            self.inner,
            tokens or ApiTokens(None, None),
            TokenBuckets(1, burst),
            requests_per_minute=1,
            burst=burst,
            protect_metrics=protect_metrics,
        )

    async def ask(self, client: str = "203.0.113.1", token: bytes | None = None, **request: Any):
        """Send a request; return its context and the messages of its response."""
        headers = [*request.pop("headers", ())]
        headers += [] if token is None else [(b"authorization", token)]
        self.inner.scope = None
        return await exchange(
            self.middleware, headers=headers, peer=client, proxies=[PROXY], **request
        )

    async def status(self, *args: Any, **request: Any) -> int:
        _, sent = await self.ask(*args, **request)
        return sent[0]["status"]


PUBLIC = [
    *(("GET", path) for path in ("/", "/health", "/health/ready", "/ui", "/ui/logic.js", "/docs")),
    *(("GET", path) for path in ("/redoc", "/openapi.json", "/static/docs/a.js", "/ping")),
    ("GET", "/models/a/health"),
]
PROTECTED = [
    *(("POST", path) for path in ("/", "/embeddings/", "/models/a/rerank")),
    *(("GET", path) for path in ("/embeddings/", "/healthy", "/uix", "/docs.html", "/static")),
    *(("GET", path) for path in ("/v1/models", "/nowhere", "/pingpong")),
]
METRICS = [("GET", "/stats"), ("GET", "/metrics")]


@pytest.mark.parametrize("protect_metrics", [False, True])
async def test_paths_that_are_not_public_need_a_token(protect_metrics) -> None:
    public = [*PUBLIC, *([] if protect_metrics else METRICS)]
    app = App(ApiTokens("own", None), burst=100, protect_metrics=protect_metrics)
    for method, path in (*PUBLIC, *PROTECTED, *METRICS):
        for token, known in ((None, False), (b"Bearer own", True), (b"bearer  own ", True)):
            context, sent = await app.ask(token=token, method=method, path=path)
            passes = known or (method, path) in public
            assert app.inner.called == passes, path
            assert sent[0]["status"] == (200 if passes else 401)
            if not passes:
                assert header(sent, b"www-authenticate") == b"Bearer"
                assert context.error_code == "unauthorized"


async def test_no_token_is_needed_without_one_in_the_settings() -> None:
    context, sent = await App().ask(token=b"Bearer x")
    assert (sent[0]["status"], context.token_name) == (200, None)


@pytest.mark.parametrize(
    ("key", "authorization", "reason"),
    [
        *((b"own", authorization, None) for authorization in (None, b"")),
        (b"hush", None, "The token is unknown"),
        (b" ", None, "No token was sent"),
        (b"own", b"Bearer hush", "The token is unknown"),
    ],
)
async def test_api_key_is_the_token_of_a_request_without_authorization(
    tokens: ApiTokens, key: bytes, authorization: bytes | None, reason: str | None
) -> None:
    _, sent = await App(tokens).ask(token=authorization, headers=[(b"api-key", key)])
    assert sent[0]["status"] == (200 if reason is None else 401)
    if reason is not None:
        assert orjson.loads(sent[1]["body"])["detail"].startswith(f"{reason}: ")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *((value, None) for value in (b"Bearer own", b"BEARER own", b"own")),
        *((value, "No token was sent") for value in (None, b"")),
        (b"Bearer ", "The Authorization header holds no bearer token"),
        (b"Basic b3duOm93bg==", "The Authorization header holds no bearer token"),
        (b"Bearer own more", "The token is unknown"),
        (b"Bearer hush", "The token is unknown"),
    ],
)
async def test_a_token_is_read_after_bearer_or_alone_and_a_401_gives_the_reason(
    tokens: ApiTokens, value: bytes | None, reason: str | None
) -> None:
    context, sent = await App(tokens).ask(token=value)
    assert (sent[0]["status"] == 200) == (reason is None)
    assert context.token_name == ("default" if reason is None else None)
    if reason is not None:
        detail = orjson.loads(sent[1]["body"])["detail"]
        assert detail.startswith(f"{reason}: send Authorization: Bearer <token>")
        assert "hush" not in detail


async def test_the_rate_limit_counts_every_spelling_of_a_path_for_work_and_no_other_path() -> None:
    app = App()
    assert await app.status() == 200, "one budget for all endpoints"
    for path in ("/embeddings", "/embeddings/\n", "/rerank", "/rerank/"):
        assert [await app.status(path=path) for _ in range(3)] == [429] * 3
    for path in ("/health", "/stats", "/metrics", "/docs", "/embeddings/"):
        assert [await app.status(method="GET", path=path) for _ in range(3)] == [200] * 3
    assert await app.status(path="/nowhere") == 200
    _, (start, body) = await app.ask()
    assert dict(start["headers"])[b"retry-after"] == b"60"
    content = orjson.loads(body["body"])
    assert content["code"] == "rate_limited"
    assert content["detail"] == (
        "Too many requests: 1 requests at once and 1 a minute are allowed "
        "(RATE_LIMIT_BURST_SIZE, RATE_LIMIT_REQUESTS_PER_MINUTE); try again in 60 s."
    )


async def test_the_rate_limit_counts_by_address_and_by_the_64_of_ipv6() -> None:
    app = App()
    clients = ["203.0.113.1", "203.0.113.2", "2001:db8::1", "2001:db8::2", "::ffff:203.0.113.1"]
    assert [await app.status(client) for client in clients] == [200, 200, 200, 429, 429]
    spoofed = [(b"x-forwarded-for", b"198.51.100.1")]
    assert await app.status("203.0.113.1", headers=spoofed) == 429
    assert await app.status("10.0.0.1", headers=spoofed) == 200, "a trusted proxy names it"
    assert await app.status("198.51.100.1") == 429, "the same client without the proxy"


async def test_the_rate_limit_counts_a_named_token_by_name_and_api_token_by_address(tokens) -> None:
    app = App(tokens)
    assert await app.status("203.0.113.1", b"Bearer alices") == 200
    assert await app.status("203.0.113.2", b"Bearer alices") == 429
    assert await app.status("203.0.113.1", b"Bearer bobs") == 200
    clients = ["203.0.113.1", "203.0.113.1", "203.0.113.2"]
    assert [await app.status(client, b"Bearer own") for client in clients] == [200, 429, 200]
    # Scrapes with the correct token pass.
    assert await app.status("203.0.113.1", b"Bearer own", method="GET", path="/metrics") == 200


async def test_a_client_over_its_rate_limit_gets_429_for_a_wrong_token_too(tokens) -> None:
    """Retry-After is the longer of both waits."""
    app = App(tokens)
    assert await app.status(token=b"Bearer own") == 200
    context, sent = await app.ask(token=GUESS)
    assert (sent[0]["status"], context.error_code) == (429, "rate_limited")
    assert header(sent, b"retry-after") == b"60"


@pytest.mark.parametrize(
    ("method", "path", "named"),
    [
        ("POST", "/nowhere", 429),
        ("GET", "/embeddings/", 429),
        ("OPTIONS", "/rerank", 429),
        # A path that an operator's programs poll.
        ("GET", "/metrics", 200),
    ],
)
async def test_after_too_many_wrong_tokens_a_correct_one_gets_429_as_well(
    tokens: ApiTokens, method: str, path: str, named: int
) -> None:
    app, request = App(tokens, burst=3), {"method": method, "path": path}
    assert await app.status(token=b"Bearer own", **request) == 200
    statuses = [await app.status(token=b"Bearer guess %d" % i, **request) for i in range(5)]
    assert statuses == [401, 401, 401, 429, 429]
    assert await app.status(token=GUESS) == 429, "one bucket for all paths"
    assert await app.status(**request) == 429, "a missing token counts as a failure"
    assert await app.status(token=b"Bearer own", **request) == 429
    assert await app.status(token=b"Bearer alices", **request) == named
    for token, status in ((b"Bearer own", 200), (GUESS, 401)):
        assert await app.status("203.0.113.9", token, **request) == status


async def test_public_paths_stay_public_after_any_number_of_wrong_tokens(tokens) -> None:
    app = App(tokens)
    for _ in range(3):
        await app.ask(token=GUESS)
    for path in ("/", "/health", "/openapi.json"):
        assert await app.status(token=GUESS, method="GET", path=path) == 200


async def test_a_token_with_limits_has_buckets_of_its_own_and_shows_them(tmp_path) -> None:
    """Bob has only a limit of tokens, so the limit of all clients counts his requests."""
    lines = "alice:a\nrequests_per_minute=3\nbob:b\ntokens_per_minute=100\ncarol:c\n"
    (tmp_path / "tokens").write_text(lines)
    app = App(ApiTokens(None, tmp_path / "tokens"))
    assert [await app.status(token=b"Bearer a") for _ in range(4)] == [200, 200, 200, 429]
    for token in (b"Bearer b", b"Bearer c"):
        assert [await app.status(token=token) for _ in range(2)] == [200, 429]
    context, sent = await app.ask(token=b"Bearer a")
    assert header(sent, b"ratelimit-policy") == b'"requests";q=3;w=60'
    assert header(sent, b"ratelimit") == b'"requests";r=0;t=60'
    assert context.error_code == "rate_limited"
    assert "requests_per_minute of alice" in orjson.loads(sent[1]["body"])["detail"]
    _, sent = await app.ask(token=b"Bearer b", method="GET", path="/v1/models")
    assert header(sent, b"ratelimit") == b'"tokens";r=100;t=0'
    context, sent = await app.ask(token=b"Bearer c", method="GET", path="/v1/models")
    assert (context.client_weight, context.charge) == (1, None)
    assert b"ratelimit" not in dict(sent[0]["headers"])

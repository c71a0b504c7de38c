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
    """An app that answers 200 to who has a token, `burst` times for each client."""

    def __init__(
        self, tokens: ApiTokens | None = None, *, burst: int = 1, protect_metrics: bool = True
    ) -> None:
        self.inner = Inner()
        self.checked = RequireTokenAndLimitRate(
            self.inner,
            tokens or ApiTokens(None, None),
            TokenBuckets(1, burst),
            requests_per_minute=1,
            burst=burst,
            protect_metrics=protect_metrics,
        )

    async def ask(self, client: str = "203.0.113.1", token: bytes | None = None, **request: Any):
        """The context of the request, and the messages of its answer."""
        headers = [*request.pop("headers", ())]
        headers += [] if token is None else [(b"authorization", token)]
        self.inner.scope = None
        return await exchange(
            self.checked, headers=headers, peer=client, proxies=[PROXY], **request
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


@pytest.mark.parametrize(("method", "path"), [*PUBLIC, *PROTECTED, *METRICS])
@pytest.mark.parametrize("protect_metrics", [False, True])
async def test_what_is_no_public_page_needs_the_token(method, path, protect_metrics) -> None:
    public = [*PUBLIC, *([] if protect_metrics else METRICS)]
    app = App(ApiTokens("own", None), burst=100, protect_metrics=protect_metrics)
    for token, known in ((None, False), (b"Bearer own", True), (b"bearer  own ", True)):
        context, sent = await app.ask(token=token, method=method, path=path)
        passes = known or (method, path) in public
        assert app.inner.called == passes
        assert sent[0]["status"] == (200 if passes else 401)
        if not passes:
            assert header(sent, b"www-authenticate") == b"Bearer"
            assert context.error_code == "unauthorized"


async def test_without_a_token_in_the_settings_nothing_is_asked_nor_of_what_is_no_http() -> None:
    context, sent = await App().ask(token=b"Bearer x")
    assert (sent[0]["status"], context.token_name) == (200, None)
    seen = []

    async def inner(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope)

    app = App(ApiTokens("own", None)).checked
    app.app = inner
    await app({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == [{"type": "lifespan"}]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((value, None) for value in (b"Bearer own", b"BEARER own", b"own")),
        *((value, "No token was sent") for value in (None, b"")),
        (b"Bearer ", "The Authorization header holds no bearer token"),
        (b"Basic b3duOm93bg==", "The Authorization header holds no bearer token"),
        (b"Bearer own more", "The token is unknown"),
        (b"Bearer hush", "The token is unknown"),
    ],
)
async def test_a_token_is_read_after_bearer_or_alone_and_a_refusal_says_what_was_sent(
    tokens: ApiTokens, value: bytes | None, said: str | None
) -> None:
    context, sent = await App(tokens).ask(token=value)
    assert (sent[0]["status"] == 200) == (said is None)
    assert context.token_name == ("default" if said is None else None)
    if said is not None:
        detail = orjson.loads(sent[1]["body"])["detail"]
        assert detail.startswith(f"{said}: send Authorization: Bearer <token>")
        assert "hush" not in detail


@pytest.mark.parametrize(
    ("method", "path", "is_limited"),
    [
        *(("POST", path, True) for path in ("/embeddings", "/embeddings/", "/embeddings/\n")),
        *(("POST", path, True) for path in ("/rerank", "/rerank/", "/rerank/\n")),
        *(("GET", path, False) for path in ("/health", "/health/live", "/stats", "/metrics")),
        *(("GET", path, False) for path in ("/docs", "/embeddings/")),
        ("POST", "/nowhere", False),
    ],
)
async def test_every_spelling_of_an_endpoint_that_does_work_is_limited_and_nothing_else(
    method: str, path: str, is_limited: bool
) -> None:
    app = App()
    assert await app.status() == 200, "one budget for all endpoints"
    statuses = [await app.status(method=method, path=path) for _ in range(3)]
    assert statuses == [429 if is_limited else 200] * 3
    if is_limited:
        _, (start, body) = await app.ask(method=method, path=path)
        assert dict(start["headers"])[b"retry-after"] == b"60"
        content = orjson.loads(body["body"])
        assert content["code"] == "rate_limited"
        assert content["detail"] == (
            "Too many requests: 1 requests at once and 1 a minute are allowed "
            "(RATE_LIMIT_BURST_SIZE, RATE_LIMIT_REQUESTS_PER_MINUTE); try again in 60 s."
        )


async def test_each_address_has_its_own_budget_and_an_ipv6_64_is_one() -> None:
    app = App()
    clients = ["203.0.113.1", "203.0.113.2", "2001:db8::1", "2001:db8::2", "::ffff:203.0.113.1"]
    assert [await app.status(client) for client in clients] == [200, 200, 200, 429, 429]
    spoofed = [(b"x-forwarded-for", b"198.51.100.1")]
    assert await app.status("203.0.113.1", headers=spoofed) == 429
    assert await app.status("10.0.0.1", headers=spoofed) == 200, "a trusted proxy names it"
    assert await app.status("198.51.100.1") == 429, "the same client without the proxy"


async def test_a_named_token_counts_by_its_name_and_the_one_token_by_address(tokens) -> None:
    app = App(tokens)
    assert await app.status("203.0.113.1", b"Bearer alices") == 200
    assert await app.status("203.0.113.2", b"Bearer alices") == 429
    assert await app.status("203.0.113.1", b"Bearer bobs") == 200
    clients = ["203.0.113.1", "203.0.113.1", "203.0.113.2"]
    assert [await app.status(client, b"Bearer own") for client in clients] == [200, 429, 200]
    # Much work stops no scrape with the right token.
    assert await app.status("203.0.113.1", b"Bearer own", method="GET", path="/metrics") == 200


async def test_wrong_tokens_are_401_until_the_address_is_limited(tokens: ApiTokens) -> None:
    app = App(tokens, burst=3)
    statuses = [await app.status(token=b"Bearer guess %d" % i) for i in range(5)]
    assert statuses == [401, 401, 401, 429, 429]
    assert await app.status(token=b"Bearer own") == 429, "guesses and API_TOKEN share the budget"
    assert await app.status(token=b"Bearer alices") == 200, "a named token is not shut out"
    assert await app.status("203.0.113.9", GUESS) == 401


async def test_who_has_used_up_its_work_has_no_tries_for_a_token_either(tokens) -> None:
    """And the other way round: the longer of both waits is told."""
    app = App(tokens)
    assert await app.status(token=b"Bearer own") == 200
    context, sent = await app.ask(token=GUESS)
    assert (sent[0]["status"], context.error_code) == (429, "rate_limited")
    assert header(sent, b"retry-after") == b"60"


@pytest.mark.parametrize(
    ("method", "path", "named"),
    [
        *((method, "/nowhere", 429) for method in ("GET", "POST")),
        ("GET", "/embeddings/", 429),
        ("OPTIONS", "/rerank", 429),
        # What an operator's programs ask for again and again.
        *(("GET", path, 200) for path in ("/metrics", "/stats")),
    ],
)
async def test_a_failed_token_counts_everywhere_and_then_the_right_one_is_not_told(
    tokens: ApiTokens, method: str, path: str, named: int
) -> None:
    app, there = App(tokens, burst=3), {"method": method, "path": path}
    assert await app.status(token=b"Bearer own", **there) == 200
    statuses = [await app.status(token=b"Bearer guess %d" % i, **there) for i in range(5)]
    assert statuses == [401, 401, 401, 429, 429]
    assert await app.status(token=GUESS) == 429, "one budget for all paths"
    assert await app.status(**there) == 429, "no token at all is a failure too"
    assert await app.status(token=b"Bearer own", **there) == 429
    assert await app.status(token=b"Bearer alices", **there) == named, "where it opens something"
    for token, status in ((b"Bearer own", 200), (GUESS, 401)):
        assert await app.status("203.0.113.9", token, **there) == status


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/docs", "/openapi.json"])
async def test_public_paths_stay_public_after_any_number_of_guesses(tokens, path: str) -> None:
    app = App(tokens)
    for _ in range(3):
        await app.ask(token=GUESS)
    assert await app.status(token=GUESS, method="GET", path=path) == 200

"""Who may ask: pages of other sites, during the drain, without a token, above the rate limit."""

import asyncio
from ipaddress import ip_network
from typing import Any

import orjson
import pytest

from app.middleware.auth import ApiTokens, RequireTokenAndLimitRate
from app.middleware.draining import Drain, RefuseWhileDraining
from app.middleware.origin import CheckOrigin
from app.middleware.rate_limit import TokenBuckets
from tests.app.middleware.exchange import Inner, exchange, header
from tests.support.skipped_time import in_skipped_time, turns

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


@pytest.mark.parametrize(
    ("allowed", "more", "status", "shown"),
    [
        pytest.param([], [], 403, None, id="strange"),
        pytest.param([], [(b"sec-fetch-site", b"same-origin")], 200, None, id="a browser knows"),
        pytest.param(["*"], [], 200, b"*", id="any is allowed"),
        pytest.param([SITE], [(b"origin", SITE.encode())], 403, None, id="several"),
    ],
)
async def test_a_strange_origin_is_believed_from_a_browser_or_where_any_is_allowed(
    allowed, more, status, shown
) -> None:
    strange = [(b"host", b"internal"), (b"origin", b"https://public.example")]
    _, sent = await exchange(CheckOrigin(Inner(), allowed), headers=[*strange, *more])
    assert sent[0]["status"] == status
    assert header(sent, b"access-control-allow-origin") == shown
    if status == 403:
        named = "https://public.example" + (f", {SITE}" if SITE in allowed else "")
        detail = orjson.loads(sent[1]["body"])["detail"]
        assert detail.startswith(f"A web page of {named} may not call this service: CORS_ORIGINS")


async def test_a_page_that_is_allowed_may_send_any_header_and_read_the_ids() -> None:
    inner, origin = Inner(), (b"origin", SITE.encode())
    asks = [
        origin,
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", b"authorization,x-request-id"),
        (b"access-control-request-private-network", b"true"),
    ]
    _, sent = await exchange(CheckOrigin(inner, [SITE]), method="OPTIONS", headers=asks)
    assert (sent[0]["status"], inner.called) == (200, False)
    assert b"POST" in header(sent, b"access-control-allow-methods")
    assert header(sent, b"access-control-allow-headers") == b"authorization,x-request-id"
    assert header(sent, b"access-control-allow-private-network") == b"true"
    _, sent = await exchange(CheckOrigin(inner, [SITE]), headers=[origin])
    exposed = header(sent, b"access-control-expose-headers")
    assert b"X-Request-ID" in exposed
    assert b"Vector-Space" in exposed


# During a graceful shutdown.


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


@in_skipped_time
async def test_the_shutdown_waits_for_the_work_that_was_accepted() -> None:
    drain, go = Drain(), asyncio.Event()

    async def work(_scope: Any, _receive: Any, _send: Any) -> None:
        await go.wait()

    app = RefuseWhileDraining(work, drain)
    accepted = asyncio.create_task(exchange(app))
    await turns()
    waits = asyncio.create_task(drain.wait_for_none())
    await turns()
    assert not waits.done()
    go.set()
    await asyncio.gather(waits, accepted)
    go.clear()
    checked = asyncio.create_task(exchange(app, method="GET", path="/health"))
    await turns()
    async with asyncio.timeout(1):
        await drain.wait_for_none()  # Nobody waits for a health check.
    checked.cancel()


async def test_from_then_on_every_response_announces_that_its_connection_closes() -> None:
    drain = Drain()

    async def work(_scope: Any, _receive: Any, send: Any) -> None:
        drain.begin()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    for app, path in ((Inner(), "/health"), (work, "/rerank"), (Inner(), "/health")):
        begun = drain.begun
        _, sent = await exchange(RefuseWhileDraining(app, drain), path=path)
        assert header(sent, b"connection") == (b"close" if begun or app is work else None)


# Tokens and rates; the buckets are the real ones.

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

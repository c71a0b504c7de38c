"""Which requests count, and for whom; the buckets are the real ones."""

from ipaddress import ip_network
from typing import Any

import orjson
import pytest

from smart_embedder.access.rate_limit import MemoryBuckets
from smart_embedder.access.tokens import ApiTokens
from smart_embedder.middleware.access import LimitRate, RateLimiter, RequireToken
from smart_embedder.middleware.observe import ProvideContext
from tests.support.paths import PATHS

PROXY = ip_network("10.0.0.0/8")


async def answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class App:
    """The token check and the rate limit around an app that answers 200."""

    def __init__(
        self, burst: int = 1, tokens: ApiTokens | None = None, *, protect_metrics: bool = False
    ) -> None:
        limiter = RateLimiter(MemoryBuckets(1, burst), 1, burst)
        checked = RequireToken(
            LimitRate(answer, limiter),
            tokens or ApiTokens(None, None),
            limiter,
            protect_metrics=protect_metrics,
        )
        self._app = ProvideContext(checked, [PROXY], PATHS)

    async def send(
        self,
        client: str = "203.0.113.1",
        path: str = "/embeddings/",
        method: str = "POST",
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> list[dict[str, Any]]:
        """The messages of the answer."""
        sent: list[dict[str, Any]] = []

        async def record(message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": headers or []}
        await self._app(scope | {"client": (client, 1)}, None, record)
        return sent

    async def status(self, *args, **options) -> int:
        start, *_ = await self.send(*args, **options)
        return start["status"]


def forwarded(*values: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-forwarded-for", value.encode()) for value in values]


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {token}".encode())]


@pytest.mark.parametrize(
    "path", ["/embeddings", "/embeddings/", "/rerank", "/rerank/", "/rerank/\n", "/embeddings/\n"]
)
async def test_every_spelling_of_an_endpoint_that_does_work_is_limited(path: str) -> None:
    app = App()
    assert [await app.status(path=path) for _ in range(2)] == [200, 429]
    assert await app.status(path="/embeddings/") == 429, "one budget for all endpoints"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("GET", "/health/live"),
        ("GET", "/stats"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("GET", "/embeddings/"),
        ("POST", "/nowhere"),
    ],
)
async def test_nothing_else_is_limited(method: str, path: str) -> None:
    app = App()
    assert await app.status() == 200
    assert [await app.status(method=method, path=path) for _ in range(3)] == [200] * 3


async def test_a_refusal_says_when_to_come_again() -> None:
    app = App()
    await app.send()
    start, body = await app.send()
    headers = dict(start["headers"])
    assert headers[b"retry-after"] == b"60"
    content = orjson.loads(body["body"])
    assert content["code"] == "rate_limited"
    assert content["detail"] == (
        "Too many requests: 1 requests at once and 1 a minute are allowed (RATE_LIMIT_BURST_SIZE, "
        "RATE_LIMIT_REQUESTS_PER_MINUTE); try again in 60 s."
    )


async def test_each_address_has_its_own_budget_and_an_ipv6_64_is_one() -> None:
    app = App()
    clients = ["203.0.113.1", "203.0.113.2", "2001:db8::1", "2001:db8::2", "::ffff:203.0.113.1"]
    assert [await app.status(client) for client in clients] == [200, 200, 200, 429, 429]


async def test_a_spoofed_header_changes_nothing_without_a_trusted_proxy() -> None:
    app = App()
    statuses = [
        await app.status("203.0.113.1", headers=forwarded(f"198.51.100.{i}")) for i in range(3)
    ]
    assert statuses == [200, 429, 429]


async def test_behind_a_trusted_proxy_the_right_most_untrusted_address_counts() -> None:
    app = App()
    seen = [
        forwarded("198.51.100.1"),
        forwarded("9.9.9.9, 198.51.100.1:80"),
        forwarded("9.9.9.9", "198.51.100.1, 10.0.0.7"),
        forwarded("198.51.100.1, 198.51.100.2"),
    ]
    statuses = [await app.status("10.0.0.1", headers=headers) for headers in seen]
    assert statuses == [200, 429, 429, 200]
    assert await app.status("198.51.100.1") == 429, "the same client without the proxy"


@pytest.fixture
def tokens(tmp_path) -> ApiTokens:
    (tmp_path / "tokens").write_text("alice:alices\nbob:bobs\n")
    return ApiTokens("own", tmp_path / "tokens")


async def test_a_named_token_counts_by_its_name_wherever_it_comes_from(tokens: ApiTokens) -> None:
    app = App(tokens=tokens)
    assert await app.status("203.0.113.1", headers=bearer("alices")) == 200
    assert await app.status("203.0.113.2", headers=bearer("alices")) == 429
    assert await app.status("203.0.113.1", headers=bearer("bobs")) == 200


async def test_the_one_token_counts_by_address(tokens: ApiTokens) -> None:
    app = App(tokens=tokens)
    clients = ["203.0.113.1", "203.0.113.1", "203.0.113.2"]
    statuses = [await app.status(client, headers=bearer("own")) for client in clients]
    assert statuses == [200, 429, 200]


async def test_wrong_tokens_are_401_until_the_address_is_limited(tokens: ApiTokens) -> None:
    app = App(burst=3, tokens=tokens)
    statuses = [await app.status(headers=bearer(f"guess {i}")) for i in range(5)]
    assert statuses == [401, 401, 401, 429, 429]
    assert await app.status(headers=bearer("own")) == 429, "guesses and API_TOKEN share the budget"
    assert await app.status(headers=bearer("alices")) == 200, "a named token is not shut out"
    assert await app.status("203.0.113.9", headers=bearer("guess")) == 401


ELSEWHERE = [
    ("GET", "/nowhere"),
    ("POST", "/nowhere"),
    ("GET", "/embeddings/"),
    ("OPTIONS", "/rerank"),
    ("GET", "/metrics"),
    ("GET", "/stats"),
]


@pytest.mark.parametrize(("method", "path"), ELSEWHERE)
async def test_a_failed_token_counts_whatever_the_path_and_method(
    tokens: ApiTokens, method: str, path: str
) -> None:
    app = App(burst=3, tokens=tokens, protect_metrics=True)
    there = {"method": method, "path": path}
    statuses = [await app.status(**there, headers=bearer(f"guess {i}")) for i in range(5)]
    assert statuses == [401, 401, 401, 429, 429]
    assert await app.status(headers=bearer("guess")) == 429, "one budget for all paths"
    assert await app.status(**there) == 429, "no token at all is a failure too"
    assert await app.status("203.0.113.9", **there, headers=bearer("guess")) == 401


@pytest.mark.parametrize(("method", "path"), ELSEWHERE)
async def test_an_address_without_tries_left_does_not_learn_the_right_token(
    tokens: ApiTokens, method: str, path: str
) -> None:
    app = App(burst=3, tokens=tokens, protect_metrics=True)
    there = {"method": method, "path": path}
    assert await app.status(**there, headers=bearer("own")) == 200
    for guess in range(4):
        await app.send(**there, headers=bearer(f"guess {guess}"))
    assert await app.status(**there, headers=bearer("own")) == 429
    assert await app.status("203.0.113.9", **there, headers=bearer("own")) == 200
    named = await app.status(**there, headers=bearer("alices"))
    assert named == (200 if path in {"/metrics", "/stats"} else 429), "where it opens something"


async def test_much_work_stops_no_scrape_with_the_right_token(tokens: ApiTokens) -> None:
    app = App(burst=1, tokens=tokens, protect_metrics=True)
    work = [await app.status(headers=bearer("own")) for _ in range(3)]
    assert work == [200, 429, 429]
    assert await app.status(method="GET", path="/metrics", headers=bearer("own")) == 200


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/docs", "/openapi.json"])
async def test_public_paths_stay_public_after_any_number_of_guesses(
    tokens: ApiTokens, path: str
) -> None:
    app = App(burst=1, tokens=tokens, protect_metrics=True)
    for _ in range(3):
        await app.send(headers=bearer("guess"))
    assert await app.status(method="GET", path=path, headers=bearer("guess")) == 200


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "No token was sent"),
        ("Basic b3duOm93bg==", "The Authorization header holds no bearer token"),
        ("Bearer ", "The Authorization header holds no bearer token"),
        ("Bearer hush", "The token that was sent is not known"),
    ],
)
async def test_a_refusal_says_what_was_sent_and_how_to_send_a_token(
    tokens: ApiTokens, value: str | None, said: str
) -> None:
    headers = [] if value is None else [(b"authorization", value.encode())]
    _, body = await App(tokens=tokens).send(headers=headers)
    detail = orjson.loads(body["body"])["detail"]
    assert detail.startswith(said)
    assert "Authorization: Bearer <token>" in detail
    assert "hush" not in detail

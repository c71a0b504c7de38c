"""What is known of a request before anything else looks at it."""

from ipaddress import ip_network
from typing import Any

import pytest

from smart_embedder.api.context import NATIVE_EMBEDDINGS, RERANK
from smart_embedder.middleware.observe import ProvideContext
from tests.middleware.exchange import Inner, exchange, header
from tests.support.paths import PATHS

PROXIES = [ip_network("::ffff:10.0.0.0/104")]


@pytest.mark.parametrize(
    ("method", "path", "endpoint", "route"),
    [
        ("POST", "/embeddings/", NATIVE_EMBEDDINGS, "/embeddings/"),
        ("POST", "/embeddings", NATIVE_EMBEDDINGS, "/embeddings/"),
        ("POST", "/embeddings//\n", NATIVE_EMBEDDINGS, "/embeddings/"),
        ("POST", "/rerank/", RERANK, "/rerank"),
        ("GET", "/rerank", None, "/rerank"),
        ("GET", "//", None, "/"),
        ("POST", "/nowhere/", None, "/nowhere"),
    ],
)
async def test_an_endpoint_is_known_by_any_spelling_of_its_path(method, path, endpoint, route):
    inner = Inner()
    context, _ = await exchange(inner, method=method, path=path)
    assert (context.endpoint, context.route) == (endpoint, route)
    assert inner.scope["path"] == route
    assert context.path == path.replace("\n", "\\n")


@pytest.mark.parametrize(
    ("given", "kept"),
    [(b"mine-1", True), (b"a" * 128, True), (b"a" * 129, False), (b"a b", False), (b"", False)],
)
async def test_an_id_that_can_be_printed_is_the_clients_own(given: bytes, kept: bool) -> None:
    context, sent = await exchange(Inner(), headers=[(b"x-request-id", given)])
    assert (context.request_id.encode() == given) == kept
    assert header(sent, b"x-request-id") == context.request_id.encode()
    assert context.request_id


async def test_status_and_sizes_are_kept_up_to_date() -> None:
    context, sent = await exchange(Inner(), b"abc", b"", b"de")
    assert (context.status, context.bytes_in, context.bytes_out) == (200, 5, 2)
    assert len(sent) == 2


@pytest.mark.parametrize(
    ("peer", "address"),
    [("10.0.0.7", "198.51.100.1"), ("192.0.2.9", "192.0.2.9"), ("", "unknown")],
)
async def test_only_a_trusted_proxy_names_the_client_and_the_path_above(peer, address) -> None:
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
        ("/base/", "/base/rerank", "/rerank"),
        ("/base", "/rerank", "/rerank"),
        ("/base", "/base", "/"),
        ("/base", "/basement", "/basement"),
    ],
)
async def test_a_path_that_the_server_names_is_taken_off_once(root, path, route) -> None:
    inner = Inner()
    context, _ = await exchange(inner, path=path, root_path=root)
    assert (context.route, context.prefix) == (route, "/base")
    assert inner.scope["path"] == f"/base{route}"


async def test_the_query_is_left_to_whoever_reads_one() -> None:
    inner = Inner()
    context, _ = await exchange(inner, query_string=b"a=b")
    assert (context.query, inner.scope["query_string"]) == (b"a=b", b"")


async def test_what_is_no_http_passes_untouched() -> None:
    inner, scope = Inner(), {"type": "lifespan"}

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(_message: Any) -> None:
        pass

    await ProvideContext(inner, [], PATHS)(scope, receive, send)
    assert inner.scope == {"type": "lifespan"}


async def test_cookies_are_left_to_nobody() -> None:
    inner = Inner()
    await exchange(inner, headers=[(b"cookie", b"a=b"), (b"accept", b"*/*"), (b"cookie", b"c")])
    assert inner.scope["headers"] == [(b"accept", b"*/*")]

"""The nginx of docs/network.md and the project's Caddyfile in front of a server."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.support.proxies import LIMIT, NAME, run_caddy, run_nginx

MAX_BODY = 16 << 20
BURST = 3
STALLED = (
    b"POST /embeddings/ HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    b'Content-Length: 100\r\n\r\n{"sentences":'
)


PROXIES = {"nginx": run_nginx, "caddy": run_caddy}


@pytest.fixture(scope="module", params=PROXIES)
def proxy(
    serve, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[str]:
    """A proxy in front of a server that trusts it, with a low rate limit per address."""
    with serve(
        TRUSTED_PROXIES="127.0.0.1",
        RATE_LIMIT_BURST_SIZE=str(BURST),
        RATE_LIMIT_REQUESTS_PER_MINUTE="1",
    ) as server:
        upstream = server.url.removeprefix("http://")
        with PROXIES[request.param](tmp_path_factory.mktemp(request.param), upstream) as url:
            yield url


def client_at(address: str, url: str) -> httpx2.Client:
    """Return a client with its own address, which accepts any certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    transport = httpx2.HTTPTransport(local_address=address, verify=context)
    return httpx2.Client(
        base_url=url, transport=transport, headers={"Host": NAME}, timeout=LIMIT, trust_env=False
    )


def statuses(client: httpx2.Client, count: int, **headers: str) -> list[int]:
    body = {"sentences": ["a text"], "return_colbert": False}
    return [
        client.post("/embeddings/", json=body, headers=headers).status_code for _ in range(count)
    ]


def test_rate_limit_counts_by_client_and_addresses_cannot_be_forged(proxy: str) -> None:
    claims = {"X-Forwarded-For": "127.0.0.99"}
    with client_at("127.0.0.2", proxy) as first, client_at("127.0.0.3", proxy) as second:
        assert statuses(first, BURST + 1) == [200] * BURST + [429]
        assert statuses(first, 1, **claims) == [429]
        assert statuses(second, 1) == [200]


def test_body_limit_413_of_the_proxy_equals_that_of_the_service(proxy: str) -> None:
    with client_at("127.0.0.4", proxy) as client:
        begin, end = b'{"sentences": ["a', b'"]}'
        body = begin.ljust(MAX_BODY - len(end)) + end
        kind = {"Content-Type": "application/json"}
        assert client.post("/embeddings/", content=body, headers=kind).status_code == 200
        refused = client.post("/embeddings/", content=body + b" ", headers=kind)
        assert refused.status_code == 413


def test_origin_request_id_and_errors_pass_the_proxy(proxy: str) -> None:
    with client_at("127.0.0.5", proxy) as client:
        assert statuses(client, 1, Origin=f"https://{NAME}") == [200]
        assert statuses(client, 1, Origin="https://elsewhere.example.com") == [403]
        answer = client.post("/embeddings/", json={}, headers={"X-Request-ID": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (422, "mine")
        assert answer.json()["request_id"] == "mine"
        assert len(client.get("/health").headers["x-request-id"]) > 0


def test_proxy_skips_a_draining_process(serve, tmp_path: Path) -> None:
    """In a rolling restart, a stalled upload keeps the first process from ending."""
    trusted = {"TRUSTED_PROXIES": "127.0.0.1"}
    with serve(**trusted) as first, serve(**trusted) as second:
        ports = [urlsplit(server.url).port for server in (first, second)]
        both = " max_fails=0;\n server ".join(f"127.0.0.1:{port}" for port in ports)
        with (
            run_nginx(tmp_path, both) as url,
            client_at("127.0.0.8", url) as client,
            socket.create_connection(("127.0.0.1", ports[0])) as stalling,
        ):
            stalling.sendall(STALLED)
            first.wait_for_metric("embedding_active_requests", 1)
            first.process.terminate()
            first.wait_for_status("/health", 503)
            assert statuses(client, 20) == [200] * 20
            assert first.metric('embedding_requests_rejected_total{reason="draining"}') > 0
            stalling.shutdown(socket.SHUT_RDWR)
            assert first.process.wait(LIMIT) == 0
            assert statuses(client, 20) == [200] * 20

"""Clients that offer HTTP/2 with a request, as Java's and Kotlin's do, are answered in HTTP/1.1.

Sent 46: 43 answered, 3 refused (malformed), 0 lost.
"""

import json

import pytest

from tests.faults.raw import connect, read_answers

OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
PLAIN = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def body_of(text: str) -> bytes:
    return json.dumps({"sentences": [text], "return_colbert": False}).encode()


def post(text: str, offer: bytes = OFFER) -> bytes:
    body = body_of(text)
    head = b"POST /embeddings/ HTTP/1.1\r\nHost: localhost\r\n%bContent-Type: application/json\r\n"
    return head % offer + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def post_chunked(text: str) -> bytes:
    body = body_of(text)
    chunks = [body[start : start + 10] for start in range(0, len(body), 10)] + [b""]
    head = b"POST /embeddings/ HTTP/1.1\r\nHost: localhost\r\n%bContent-Type: application/json\r\n"
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head % OFFER + b"Transfer-Encoding: chunked\r\n\r\n" + framed


def texts(raw, count: int) -> list[str]:
    """The texts of so many answers; the status stands for an answer without."""
    found = []
    for status, body in read_answers(raw):
        answer = json.loads(body)
        found.append(answer["data"][0]["text"] if "data" in answer else str(status))
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("request_of", [post, post_chunked])
@pytest.mark.parametrize("step", [1, 7, 100, 100_000])
def test_the_body_is_read_wherever_the_request_is_torn_apart(server, request_of, step) -> None:
    whole = request_of("search") + PLAIN + request_of("vector " * 9) + request_of("music")
    with connect(server) as raw:
        for start in range(0, len(whole), step):
            raw.sendall(whole[start : start + step])
        assert texts(raw, 4) == ["search", "200", "vector " * 9, "music"]


def test_a_large_body_is_read_too(server) -> None:
    with connect(server) as raw:
        raw.sendall(post("search " * 20_000))
        assert texts(raw, 1) == ["search " * 20_000]


@pytest.mark.parametrize(
    "offer",
    [
        b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
        b"Connection: keep-alive, Upgrade\r\nUpgrade: h2c, foo/2\r\n",
        b"Connection: Upgrade\r\nUpgrade: h2c\r\nExpect: 100-continue\r\n",
    ],
)
def test_any_offer_is_passed_over(server, offer: bytes) -> None:
    with connect(server) as raw:
        raw.sendall(post("search", offer) + post("vector", b""))
        received = b""
        while received.count(b'"usage"') < 2:
            received += raw.recv(65_536)
        assert received.count(b"HTTP/1.1 200") == 2
        assert received.startswith(b"HTTP/1.1 100 Continue") == (b"Expect" in offer)


def test_an_offer_keeps_the_other_wishes_for_the_connection(server) -> None:
    with connect(server) as raw:
        raw.sendall(post("search", OFFER.replace(b"Upgrade, ", b"close, Upgrade, ")))
        assert texts(raw, 2) == ["search"], "and then the connection ends"


@pytest.mark.parametrize("target", ["localhost:1", "/health"])
def test_a_tunnel_is_not_made(server, target: str) -> None:
    with connect(server) as raw:
        raw.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() + PLAIN)
        ((status, body),) = read_answers(raw)
        assert (status, json.loads(body)["code"]) == (400, "malformed_request")


def test_two_lengths_are_no_request_with_an_offer_either(server) -> None:
    with connect(server) as raw:
        raw.sendall(post("search", OFFER + b"Content-Length: 3\r\n"))
        assert texts(raw, 2) == ["400"]

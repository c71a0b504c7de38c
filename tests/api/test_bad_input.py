"""Bad input through a real server process: a clear error, and the next good request answered."""

import json
import socket

import pytest

from tests.support.server import RunningServer

GOOD = {"sentences": ["search"], "return_colbert": False}


@pytest.fixture(scope="module")
def client(server: RunningServer):
    with server.client() as client:
        yield client


def post_raw(client, body: bytes):
    return client.post("/embeddings/", content=body, headers={"Content-Type": "application/json"})


def assert_still_serving(client) -> None:
    assert client.post("/embeddings/", json=GOOD).status_code == 200


def assert_error(response, status: int, code: str) -> dict:
    body = response.json()
    assert (response.status_code, body["code"]) == (status, code)
    assert body["request_id"] == response.headers["x-request-id"]
    assert body["detail"].endswith(".")
    assert "Traceback" not in response.text
    return body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b'{"sentences": null}',
        b'{"sentences": "a text and not a list"}',
        b'{"sentences": [null]}',
        b'{"sentences": [1, 2.5]}',
        b'{"sentences": [true]}',
        b'{"sentences": [["nested"]]}',
        b'{"sentences": {"0": "a"}}',
        b'{"sentences": ["a"], "return_dense": "yes"}',
        b'{"sentences": ["a"], "return_dense": 1}',
        b'{"sentences": ["a"], "return_dense": null}',
        b'{"sentences": ["a"], "unknown_field": 1}',
        b'{"sentences": ["\\ud800"]}',
        b'{"sentences": ["\\udfff lone"]}',
        b'{"sentences": ["\xff\xfe"]}',
        b'{"sentences": ["a"]} trailing',
        b"[" * 100_000,
        b'{"sentences": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_a_malformed_body_is_422_and_costs_nobody_else_anything(client, body: bytes) -> None:
    problem = assert_error(post_raw(client, body), 422, "invalid_request")
    assert problem["errors"]
    assert_still_serving(client)


def test_an_error_names_the_place_and_never_quotes_the_text(client) -> None:
    body = {"sentences": ["secret words", 7], "surprise": "more secret words"}
    response = client.post("/embeddings/", json=body)
    problem = assert_error(response, 422, "invalid_request")
    assert [item["pointer"] for item in problem["errors"]] == ["/sentences/1", "/surprise"]
    assert "secret" not in response.text


def test_an_empty_list_is_400(client) -> None:
    assert_error(client.post("/embeddings/", json={"sentences": []}), 400, "empty_input")


def test_too_many_texts_are_422(client) -> None:
    response = client.post("/embeddings/", json={"sentences": [""] * 10_000})
    problem = assert_error(response, 422, "invalid_request")
    assert "10000" in problem["detail"]
    assert "1024 are allowed (MAX_SENTENCES_PER_REQUEST)" in problem["detail"]
    assert_still_serving(client)


def test_a_thousand_empty_texts_are_embedded(client) -> None:
    answer = client.post("/embeddings/", json={"sentences": [""] * 1024}).json()
    assert len(answer["data"]) == 1024
    assert answer["usage"]["prompt_tokens"] == 2048


def test_asking_for_nothing_is_422(client) -> None:
    wanted = {f"return_{kind}": False for kind in ("dense", "sparse", "colbert")}
    assert_error(client.post("/embeddings/", json=GOOD | wanted), 422, "invalid_request")


def test_a_text_of_five_megabytes_is_truncated_and_reported(client) -> None:
    text = "search vector " * 375_000
    body = {"sentences": [text], "return_colbert": False}
    answer = client.post("/embeddings/", json=body).json()
    assert len(text) > 5_000_000
    (warning,) = answer["warnings"]
    assert warning["details"]["max_tokens"] == 8192
    assert warning["details"]["original_tokens"] > 8192 + 65_536
    assert warning["details"]["lower_bound"] is True
    assert answer["data"][0]["text"] == text
    assert_still_serving(client)


def test_a_body_over_the_limit_is_413_before_it_is_sent(server, client) -> None:
    """The server answers the announced length, without waiting for the body."""
    with connection(server) as raw:
        raw.sendall(head(40_000_000))
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert_still_serving(client)


def test_a_body_over_the_limit_without_an_announced_length_is_413(client) -> None:
    pieces = (b"x" * 1_000_000 if i else b'{"sentences": ["' for i in range(40))
    assert assert_error(post_raw(client, pieces), 413, "body_too_large")["detail"] == (
        "The body is larger than 33554432 bytes (MAX_BODY_BYTES): send fewer texts."
    )
    assert_still_serving(client)


def test_a_body_cut_off_half_way_harms_nobody(server, client) -> None:
    body = json.dumps(GOOD).encode()
    for _ in range(5):
        with connection(server) as raw:
            raw.sendall(head(len(body)) + body[: len(body) // 2])
    assert_still_serving(client)
    assert "Traceback" not in server.log


def test_unknown_routes_and_methods_have_the_same_error_shape(client) -> None:
    assert_error(client.get("/nowhere"), 404, "not_found")
    response = client.get("/embeddings/")
    assert_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def connection(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def head(length: int) -> bytes:
    return (
        b"POST /embeddings/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % length
    )

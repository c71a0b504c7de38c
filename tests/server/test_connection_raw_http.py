"""HTTP as bytes, where no app answers."""

from http import HTTPStatus

import orjson
import pytest

from smart_embedder.server.connection import content_length, error_response, head_without_upgrade


def test_an_error_is_a_whole_answer_that_says_that_the_connection_closes() -> None:
    sent = error_response(HTTPStatus.BAD_REQUEST, "malformed_request", "Größe?")
    head, _, body = sent.partition(b"\r\n\r\n")
    content = orjson.loads(body)
    status, *lines = head.decode().split("\r\n")
    assert status == "HTTP/1.1 400 Bad Request"
    assert sorted(lines) == [
        "connection: close",
        f"content-length: {len(body)}",
        "content-type: application/json",
        f"x-request-id: {content['request_id']}",
    ]
    assert (content["detail"], content["code"]) == ("Größe?", "malformed_request")
    assert error_response(HTTPStatus.BAD_REQUEST, "a", "b") != error_response(
        HTTPStatus.BAD_REQUEST, "a", "b"
    ), "each has an id of its own"


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ([(b"connection", b"Upgrade"), (b"upgrade", b"h2c")], []),
        ([(b"connection", b"keep-alive, Upgrade")], [b"connection: keep-alive"]),
        ([(b"connection", b"close,HTTP2-Settings , x")], [b"connection: close, x"]),
        ([(b"http2-settings", b"AAM"), (b"host", b"a")], [b"host: a"]),
        ([(b"connection", b""), (b"x-empty", b"")], [b"connection: ", b"x-empty: "]),
    ],
)
def test_only_the_offer_to_upgrade_is_left_out_of_a_head(sent, kept) -> None:
    lines = [b"POST /a?b HTTP/1.1", *kept, b"", b""]
    assert head_without_upgrade(b"POST", b"/a?b", "1.1", sent) == b"\r\n".join(lines)


def test_the_length_of_a_body_is_the_announced_one_or_none() -> None:
    assert content_length([(b"host", b"a"), (b"content-length", b"17")]) == 17
    assert content_length([(b"host", b"a")]) == 0

"""What is no HTTP is refused in the one shape, in its turn, and logged now and then.

Sent 312: 4 answered, 308 refused, 0 lost.
"""

import json

import pytest

from tests.faults.raw import connect, head, read_answers
from tests.faults.test_pipelining import LIVE

GARBAGE = b"\x16\x03\x01 this is not HTTP\r\n\r\n"


def refusal(raw, after: int = 0) -> tuple[int, str]:
    """Status and code of the last answer, in a body that is whole; `after` others come before."""
    *others, (status, body) = read_answers(raw)
    assert [status for status, _ in others] == [200] * after
    problem = json.loads(body)
    assert problem["detail"]
    assert problem["request_id"]
    return status, problem["code"]


def test_a_flood_of_malformed_requests_writes_a_line_now_and_then(server) -> None:
    written = len(server.log)
    for _ in range(300):
        with connect(server) as raw:
            raw.sendall(GARBAGE)
            assert refusal(raw) == (400, "malformed_request")
    assert len(server.log) - written < 5_000
    assert "malformed_request" in server.log


@pytest.mark.parametrize("after", [0, 1, 2])
def test_it_is_refused_after_the_answers_to_those_before_it(server, after: int) -> None:
    with connect(server) as raw:
        raw.sendall(LIVE * after + GARBAGE)
        assert refusal(raw, after) == (400, "malformed_request")


def test_a_body_that_breaks_off_into_garbage_is_refused(server) -> None:
    chunked = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with connect(server) as raw:
        raw.sendall(chunked + b"5\r\n12345\r\nno chunk\r\n")
        assert refusal(raw) == (400, "malformed_request")


@pytest.mark.parametrize("size", [65 << 10, 66 << 10, 100 << 10, 1 << 20])
def test_headers_over_the_limit_are_refused_also_in_one_write(server, size: int) -> None:
    with connect(server) as raw:
        raw.sendall(LIVE[:-2] + b"X-Long: " + b"x" * size + b"\r\n\r\n")
        assert refusal(raw) == (431, "headers_too_large")


def test_headers_under_the_limit_pass(server) -> None:
    with connect(server) as raw:
        raw.sendall(LIVE[:-2] + b"X-Long: " + b"x" * 64_000 + b"\r\n\r\n")
        assert next(read_answers(raw))[0] == 200


def test_what_follows_a_body_never_becomes_a_header(server) -> None:
    """A proxy that looks at the headers sees no trailers, or drops them."""
    chunked = LIVE[:-2].replace(b"GET", b"HEAD") + b"Transfer-Encoding: chunked\r\n\r\n"
    with connect(server) as raw:
        raw.sendall(chunked + b"0\r\nX-Request-ID: trailer\r\n\r\n")
        answer = raw.recv(65_536).lower()
    assert answer.startswith(b"http/1.1 200")
    assert b"\r\nx-request-id: " in answer
    assert b"trailer" not in answer

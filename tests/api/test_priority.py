"""The Priority header: what counts, and what RFC 9218 wants ignored."""

import httpx2
import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.api.handler import urgency_of


def request_with(*lines: bytes) -> Request:
    return Request({"type": "http", "headers": [(b"priority", line) for line in lines]})


@pytest.mark.parametrize(
    ("lines", "urgency"),
    [
        ([], 3),
        ([b"u=0"], 0),
        ([b"u=7, i"], 7),
        ([b"i"], 3),
        ([b"u=1;x=2"], 1),
        ([b"i", b"u=5"], 5),
        ([b"u=1", b"u=6"], 6),
    ],
)
def test_the_urgency_is_read(lines, urgency) -> None:
    assert urgency_of(request_with(*lines)) == urgency


@pytest.mark.parametrize(
    "line",
    [b"u=8", b"u=-1", b"u=1.0", b"u=?1", b"u", b"u=(1 2)", b"u=", b"U=1", b"\xff", b"u=high"],
)
def test_what_is_malformed_or_of_another_type_counts_as_not_sent(line) -> None:
    assert urgency_of(request_with(line)) == 3


@given(st.lists(st.binary(max_size=30), max_size=3))
def test_no_header_can_do_harm(lines) -> None:
    assert 0 <= urgency_of(request_with(*lines)) <= 7


def test_a_request_with_a_priority_is_answered_and_the_description_names_the_header(server) -> None:
    with server.client() as client:
        answer = client.post(
            "/embeddings/", json={"sentences": ["search"]}, headers={"Priority": "u=1, i"}
        )
        assert answer.status_code == httpx2.codes.OK
        paths = client.get("/openapi.json").json()["paths"]
    for path in ("/embeddings/", "/rerank"):
        (parameter,) = paths[path]["post"]["parameters"]
        assert (parameter["name"], parameter["in"]) == ("Priority", "header")

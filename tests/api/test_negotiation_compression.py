"""Compressed bodies and answers through a real server."""

import gzip
import random

import orjson
import pytest
from backports import zstd

from smart_embedder.api import negotiation
from tests.api.test_formats import ARROW

LARGE = ["search vector " * 900] * 4
SMALL = {"sentences": ["hybrid search"], "return_colbert": False}


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def post(client, body: bytes, path: str = "/embeddings/", **headers: str):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"} | headers
    return client.post(path, content=body, headers=headers)


def raw(client, body: dict, **headers: str) -> tuple[bytes, dict]:
    """An answer as it came over the wire."""
    with client.stream("POST", "/embeddings/", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        return b"".join(answer.iter_raw()), dict(answer.headers)


UNPACK = {"gzip": gzip.decompress, "zstd": zstd.decompress}


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("zstd", "zstd"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("gzip, zstd;q=0.5", "gzip"),
        ("gzip;q=0.5, identity", None),
        ("gzip;q=0", None),
        ("br", None),
        ("*", None),
    ],
)
def test_a_large_answer_is_compressed_as_the_client_likes_best(client, accepted, encoding) -> None:
    body = {"sentences": LARGE, "return_dense": False, "return_sparse": False}
    content, headers = raw(client, body, **{"Accept-Encoding": accepted})
    assert headers.get("content-encoding") == encoding
    assert ("content-length" in headers) == (len(content) <= 4 << 20)
    if encoding is not None:
        assert headers["vary"] == "Accept-Encoding"
        plain, _ = raw(client, body, **{"Accept-Encoding": "identity"})
        unpacked = UNPACK[encoding](content)
        assert orjson.loads(unpacked)["data"] == orjson.loads(plain)["data"]
        assert len(content) < 0.6 * len(unpacked)


def test_small_answers_and_binary_ones_are_not_compressed(client) -> None:
    _, headers = raw(client, SMALL, **{"Accept-Encoding": "gzip, zstd"})
    assert "content-encoding" not in headers
    _, headers = raw(client, {"sentences": LARGE}, **{"Accept-Encoding": "gzip", "Accept": ARROW})
    assert "content-encoding" not in headers


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_chunks_are_compressed_to_one_stream(encoding) -> None:
    chunks = [random.Random(i).randbytes(1000 * i) for i in range(9)]
    packed = b"".join(negotiation.compress(chunks, encoding))
    assert UNPACK[encoding](packed) == b"".join(chunks)


@pytest.mark.parametrize("header", ["gzip", "GZIP", "identity, gzip"])
@pytest.mark.parametrize("path", ["/embeddings/", "/v1/embeddings", "/embed"])
def test_a_gzipped_body_is_read_as_the_body_that_it_holds(client, path, header) -> None:
    texts = ["hybrid search", "naive"] * 300
    field = {"/v1/embeddings": "input", "/embed": "inputs"}.get(path, "sentences")
    plain = orjson.dumps(
        {field: texts, "return_colbert": False} if path[1] != "v" else {field: texts}
    )
    answer = post(client, gzip.compress(plain), path, **{"Content-Encoding": header})
    assert answer.status_code == 200
    expected = client.post(path, content=plain, headers={"Content-Type": "application/json"}).json()
    ours = answer.json()
    assert (ours if path == "/embed" else ours["data"]) == (
        expected if path == "/embed" else expected["data"]
    )


def test_members_and_pieces_make_no_difference(client) -> None:
    plain = orjson.dumps(SMALL)
    members = gzip.compress(plain[:9]) + gzip.compress(b"") + gzip.compress(plain[9:])

    def pieces():
        for i in range(0, len(members), 7):
            yield members[i : i + 7]

    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = client.post("/embeddings/", content=pieces(), headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", gzip.compress(b"{}" * 99, mtime=0)[:-9], gzip.compress(b"{}", mtime=0) + b"rest"],
    ids=["empty", "plain", "cut", "followed"],
)
def test_what_is_not_gzip_is_refused_and_the_next_request_is_answered(client, body) -> None:
    answer = post(client, body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "gzip" in answer.json()["detail"]
    assert post(client, gzip.compress(orjson.dumps(SMALL))).status_code == 200


def test_a_small_body_that_becomes_a_large_one_is_refused_early(client, server) -> None:
    """Of 4 GiB, no more is unpacked than a body may have."""
    member = gzip.compress(b" " * (64 << 20))
    answer = post(client, gzip.compress(b'["') + member * 64)
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    assert "MAX_BODY_BYTES" in answer.json()["detail"]


def test_members_without_end_that_hold_nothing_are_refused(client) -> None:
    empty = gzip.compress(b"")
    answer = post(client, empty * (33 * (1 << 20) // len(empty) + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")

"""Whatever a server sends, a client raises its own error or returns a valid result.

It reads no more bytes than such an answer can have, and makes no more of them in memory.
"""

import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smart_embedder_client import Client, SmartEmbedderError, limits
from smart_embedder_client.safetensors import MEDIA_TYPE, METADATA_KEY

TEXTS = ["the river", "", "a train in winter"]
ASKED: list[dict[str, Any]] = [
    {},
    {"return_colbert": True, "return_tokens": True},
    {"output_dtype": "int8", "return_colbert": True, "muvera": "document"},
]
URL = "http://127.0.0.1:8000"
EMBEDDINGS = "/embeddings/"
OF_JSON = RERANK, TOKENIZE, HEALTH = "/rerank", "/tokenize", "/health"
Body = bytes | Iterator[bytes]


class Bytes(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in chunks, for both clients."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def respond_with(body: Body, status: int = 200, **headers: str) -> httpx.MockTransport:
    """Return a server that gives all requests the same response."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}

    def answer(_request: httpx.Request) -> httpx.Response:
        pieces = iter([body]) if isinstance(body, bytes) else body
        return httpx.Response(status, headers=sent, stream=Bytes(pieces))

    return httpx.MockTransport(answer)


def make_client(transport: httpx.MockTransport) -> Client:
    return Client(URL, max_retries=0, http=httpx.Client(transport=transport))


def ask(client: Client, path: str, **options: Any) -> Any:
    """Send the request that belongs to a path."""
    return {
        EMBEDDINGS: lambda: client.embed(TEXTS, **options),
        RERANK: lambda: client.rerank("river", TEXTS),
        TOKENIZE: lambda: client.tokenize(TEXTS),
        HEALTH: client.health,
    }[path]()


def check_result(path: str, answer: Any, options: dict[str, Any]) -> None:
    """Whether the result fits the request, checked independently of the client."""
    if path == EMBEDDINGS:
        assert answer.dense.shape[0] == len(answer.sparse) == len(TEXTS)
        assert np.isfinite(answer.dense).all()
        assert (answer.colbert is not None) == bool(options.get("return_colbert"))
        for sparse in answer.sparse:
            assert len(sparse.as_dict()) == len(sparse.indices) == len(sparse.values)
    elif path == RERANK:
        assert sorted(answer.indices.tolist()) == [0, 1, 2]
        assert answer.passages == [TEXTS[i] for i in answer.indices]
        assert np.isfinite(answer.scores).all()
    elif path == TOKENIZE:
        assert len(answer) == len(TEXTS)
        for tokens, text in zip(answer, TEXTS, strict=True):
            assert tokens.spans.shape == (len(tokens.ids), 2)
            assert ((tokens.spans >= 0) & (tokens.spans <= len(text))).all()


def catch_error(
    transport: httpx.MockTransport, path: str, options: dict[str, Any]
) -> SmartEmbedderError | None:
    """Return the client's error; if there is none, check that the result fits the request."""
    with make_client(transport) as client:
        try:
            found = ask(client, path, **options)
        except SmartEmbedderError as error:
            return error
    check_result(path, found, options)
    return None


def make_file(tensors: dict[str, Any], metadata: Any, data: bytes = b"") -> bytes:
    """Return a safetensors file with this header."""
    header = {"__metadata__": {METADATA_KEY: json.dumps(metadata)}, **tensors}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def split_file(content: bytes) -> tuple[dict[str, Any], Any, bytes]:
    """Split a safetensors file into header and data."""
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:start])
    metadata = json.loads(tensors.pop("__metadata__")[METADATA_KEY])
    return tensors, metadata, content[start:]


@pytest.fixture(scope="module")
def honest(server) -> dict[tuple[str, int], httpx.Response]:
    """Valid responses of the service, by path and index of the options."""
    answers: dict[tuple[str, int], httpx.Response] = {}
    sent: list[httpx.Response] = []

    def keep(response: httpx.Response) -> None:
        response.read()
        sent.append(response)

    with httpx.Client(event_hooks={"response": [keep]}) as http, Client(server.url, http=http) as c:
        for path in (EMBEDDINGS, *OF_JSON):
            for i, options in enumerate(ASKED if path == EMBEDDINGS else [{}]):
                check_result(path, ask(c, path, **options), options)
                answers[path, i] = sent[-1]
    return answers


def test_invalid_vector_space_header_is_refused(honest) -> None:
    sent = honest[EMBEDDINGS, 0]
    headers = {"Content-Type": MEDIA_TYPE, "Vector-Space": "dense-1, spärlich-2".encode("latin-1")}
    client = make_client(respond_with(sent.content, **headers))
    with pytest.raises(SmartEmbedderError, match="Vector-Space is no list of ids"):
        ask(client, EMBEDDINGS)


# Values that have broken parsers.
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 3, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf")]),
    st.text(max_size=5),
    st.just("[" * 50),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def damage(data: st.DataObject, value: Any) -> Any:
    """Change, duplicate or remove a value of the JSON."""
    inner: list[Any] = sorted(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        inner = [*range(len(value))]
    if inner and data.draw(st.integers(0, 4)):
        place, copy = data.draw(st.sampled_from(inner)), value.copy()
        copy[place] = damage(data, value[place])
        return copy
    kind = data.draw(st.integers(0, 1))
    if kind and isinstance(value, list) and value:
        return data.draw(st.sampled_from([value[::-1], value + value[-1:], value[:-1]]))
    if kind and isinstance(value, dict) and value:
        gone = data.draw(st.sampled_from(inner))
        return {name: member for name, member in value.items() if name != gone}
    if kind and type(value) is int:
        return value + data.draw(st.sampled_from([-1, 1, 8, 2**40, 10**15]))
    return data.draw(VALUES)


def damaged_file(data: st.DataObject, content: bytes) -> bytes:
    tensors, metadata, numbers = split_file(content)
    kind = data.draw(st.integers(0, 3))
    if kind == 0:
        metadata = damage(data, metadata)
    elif kind == 1:
        tensors = damage(data, tensors)
    elif kind == 2:
        start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(numbers))] * 2)))
        numbers = numbers[:start] + data.draw(st.binary(max_size=16)) + numbers[end:]
    else:
        start = data.draw(st.integers(0, max(len(numbers) - 8, 0)))
        eight = data.draw(st.binary(min_size=8, max_size=8))
        numbers = numbers[:start] + eight + numbers[start + 8 :]
    if not isinstance(tensors, dict):
        text = json.dumps(tensors).encode()
        return len(text).to_bytes(8, "little") + text + numbers
    return make_file(tensors, metadata, numbers)


@pytest.mark.parametrize(
    ("path", "place"),
    [(EMBEDDINGS, i) for i in range(len(ASKED))] + [(path, 0) for path in OF_JSON],
)
@settings(max_examples=60)
@given(data=st.data())
def test_damaged_response_is_valid_or_an_error(honest, path: str, place: int, data) -> None:
    content = honest[path, place].content
    if path in OF_JSON:
        content = json.dumps(damage(data, json.loads(content))).encode()
        transport = respond_with(content, content_type="application/json")
    else:
        content = damaged_file(data, content)
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, len(content)))
            content = content[:start] + data.draw(st.binary(max_size=20)) + content[start:]
        transport = respond_with(content, content_type=MEDIA_TYPE)
    catch_error(transport, path, ASKED[place] if path == EMBEDDINGS else {})


@pytest.mark.parametrize("path", [EMBEDDINGS, *OF_JSON])
@settings(max_examples=40)
@given(
    body=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()),
    status=st.sampled_from([200, 201, 204, 302, 400, 429, 500, 503]),
    headers=st.fixed_dictionaries(
        {},
        optional={
            "content_type": st.sampled_from([MEDIA_TYPE, "application/json", "", "text/html; ;;"]),
            "retry_after": st.text(st.characters(max_codepoint=126, min_codepoint=32), max_size=30)
            | st.sampled_from(["1e999", "-1", " ", "Mon, 1 Jan 99999 00:00:00 +99999999", ", , :"]),
            "content_encoding": st.sampled_from(["gzip", "br", "deflate", "identity", "x"]),
        },
    ),
)
def test_random_bytes_are_an_error_of_the_client(path: str, body, status, headers) -> None:
    error = catch_error(respond_with(body, status, **headers), path, {})
    assert error is None or error.retry_after is None or error.retry_after >= 0


DEEP = b"[" * 5_000 + b"]" * 5_000
MANY = b"[" + b"[]," * 300_000 + b"[]]"


@pytest.mark.parametrize(
    "body", [DEEP, MANY, b'{"detail": ' + DEEP + b"}"], ids=["deep", "many", ""]
)
@pytest.mark.parametrize("path", OF_JSON)
@pytest.mark.parametrize("status", [200, 503])
def test_deep_json_and_many_lists_are_an_error(path: str, body: bytes, status: int) -> None:
    with make_client(respond_with(body, status)) as client, pytest.raises(SmartEmbedderError):
        ask(client, path)


def test_vectors_of_more_or_fewer_texts_are_an_error(honest) -> None:
    body = honest[EMBEDDINGS, 0].content
    with make_client(respond_with(body, content_type=MEDIA_TYPE)) as client:
        assert len(client.embed(TEXTS).dense) == len(TEXTS)
        for texts in (TEXTS[:1], [*TEXTS, "another"], []):
            with pytest.raises(SmartEmbedderError, match="the vectors cannot be read"):
                client.embed(texts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: {"index": 1}}, "each once"),
        ({0: {"index": 3}}, "each once"),
        ({0: {"index": True}}, "each once"),
        ({0: {"passage": "of another request"}}, "was not sent"),
        ({0: {"score": -1e30}}, "do not fall"),
        ({0: {"score": 1e39}}, "no numbers"),
        ({0: {"score": 10**400}}, "OverflowError"),
        ({0: {"parts": {"dense": 1.0}}, 1: {"parts": None}, 2: {"parts": None}}, "other parts"),
    ],
)
def test_ranking_of_other_passages_is_an_error(honest, changes, message: str) -> None:
    answer = honest[RERANK, 0].json()
    answer["results"].sort(key=lambda result: result["index"])
    for i, result in enumerate(answer["results"]):
        result |= {"score": float(-i), "parts": None, **changes.get(i, {})}
    body = json.dumps(answer).encode()
    with (
        make_client(respond_with(body)) as client,
        pytest.raises(SmartEmbedderError, match=message),
    ):
        ask(client, RERANK)


class Endless:
    """Yields chunks without end, and counts them."""

    def __init__(self, piece: bytes) -> None:
        self._piece = piece
        self.bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self.bytes += len(self._piece)
            yield self._piece


MOST = {
    EMBEDDINGS: limits.of_vectors(TEXTS, {}),
    RERANK: limits.of_ranking("river", TEXTS),
    TOKENIZE: limits.of_tokens(TEXTS),
}


@pytest.mark.parametrize(
    ("path", "piece"),
    [
        (EMBEDDINGS, bytes(65_536)),
        (EMBEDDINGS, b"\xff\xff\x0f\x00\x00\x00\x00\x00" + b" " * 65_528),
        *((path, b" " * 65_536) for path in OF_JSON),
    ],
)
@pytest.mark.parametrize("status", [200, 503])
def test_endless_response_is_read_only_to_the_limit(
    path: str, piece: bytes, status: int, connect
) -> None:
    body = Endless(piece)
    transport = respond_with(iter(body), status, content_type=MEDIA_TYPE)
    with (
        connect(URL, max_retries=0, transport=transport) as client,
        pytest.raises(SmartEmbedderError, match="unexpected_answer"),
    ):
        ask(client, path)
    most = MOST.get(path, limits.SMALL) if status == 200 else limits.SMALL
    assert body.bytes <= most.bytes + 2 * len(piece)


def shared_tensors(honest) -> tuple[bytes, dict[str, str], int]:
    """A megabyte of bfloat16 under two thousand names would become two gigabytes of float32."""
    tensors, metadata, _ = split_file(honest[EMBEDDINGS, 0].content)
    shared = {"dtype": "BF16", "shape": [3, 170_000], "data_offsets": [0, 1_020_000]}
    tensors = {f"t{i}": shared for i in range(2_000)} | {"dense": shared}
    body = make_file(tensors, metadata | {"output_dtype": "bfloat16"}, bytes(1_020_000))
    return body, {}, 20 * len(body)


def compressed(_honest) -> tuple[bytes, dict[str, str], int]:
    """A compressed response is not unpacked: the client asks for none."""
    return gzip.compress(bytes(50_000_000)), {"content_encoding": "gzip"}, 2_000_000


def many_lists(honest) -> tuple[bytes, dict[str, str], int]:
    """A list has two bytes in JSON and sixty in memory, so lists are counted before parsing."""
    tensors, metadata, numbers = split_file(honest[EMBEDDINGS, 0].content)
    body = make_file(tensors, metadata | {"usage": [[]] * 500_000}, numbers)
    return body, {}, 8 * len(body)


@pytest.mark.parametrize("make", [shared_tensors, compressed, many_lists])
def test_response_does_not_expand_in_memory(honest, make) -> None:
    body, headers, most = make(honest)
    with make_client(respond_with(body, content_type=MEDIA_TYPE, **headers)) as client:
        tracemalloc.start()
        try:
            with pytest.raises(SmartEmbedderError, match=r"compressed \(gzip\)|has more than the"):
                client.embed(TEXTS, output_dtype="bfloat16")
            assert tracemalloc.get_traced_memory()[1] < most
        finally:
            tracemalloc.stop()

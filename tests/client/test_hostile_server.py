"""Whatever a server sends, a client ends in its own error or in an answer to what was asked.

It reads no more bytes than such an answer can have, and makes no more of them in memory.
"""

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smart_embedder_client import AsyncClient, Client, SmartEmbedderError, limits
from smart_embedder_client.safetensors import MEDIA_TYPE, METADATA_KEY

TEXTS = ["the river", "", "a train in winter"]
ASKED: list[dict[str, Any]] = [
    {},
    {"return_colbert": True, "return_tokens": True},
    {"output_dtype": "int8", "return_colbert": True, "muvera": "document"},
]
URL = "http://127.0.0.1:8000"
EMBEDDINGS, STREAM, RERANK, TOKENIZE, HEALTH = (
    "/embeddings/",
    "/embeddings/stream",
    "/rerank",
    "/tokenize",
    "/health",
)
Body = bytes | Iterator[bytes]


class Bytes(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in pieces, for both clients."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def answering(body: Body, status: int = 200, **headers: str) -> httpx.MockTransport:
    """A server that answers every request alike."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}

    def answer(_request: httpx.Request) -> httpx.Response:
        pieces = iter([body]) if isinstance(body, bytes) else body
        return httpx.Response(status, headers=sent, stream=Bytes(pieces))

    return httpx.MockTransport(answer)


def client_of(transport: httpx.MockTransport) -> Client:
    return Client(URL, max_retries=0, http=httpx.Client(transport=transport))


def ask(client: Client, path: str, **options: Any) -> Any:
    """The request that belongs to a path."""
    return {
        EMBEDDINGS: lambda: client.embed(TEXTS, **options),
        STREAM: lambda: list(client.embed_stream(TEXTS, on_error="yield", **options)),
        RERANK: lambda: client.rerank("river", TEXTS),
        TOKENIZE: lambda: client.count_tokens(TEXTS),
        HEALTH: client.health,
    }[path]()


def check_right(path: str, answer: Any, options: dict[str, Any]) -> None:
    """Whether it is an answer to the request, by other means than the client's."""
    if path == EMBEDDINGS:
        assert answer.dense.shape[0] == len(answer.sparse) == len(TEXTS)
        assert np.isfinite(answer.dense).all()
        assert (answer.colbert is not None) == bool(options.get("return_colbert"))
        for sparse in answer.sparse:
            assert len(sparse.as_dict()) == len(sparse.indices) == len(sparse.values)
    elif path == STREAM:
        assert [(each.id, each.text) for each in answer] == list(enumerate(TEXTS))
        assert all(each.dense is not None or each.error is not None for each in answer)
    elif path == RERANK:
        assert sorted(answer.indices.tolist()) == [0, 1, 2]
        assert answer.passages == [TEXTS[i] for i in answer.indices]
        assert np.isfinite(answer.scores).all()
    elif path == TOKENIZE:
        assert len(answer) == len(TEXTS)
        assert all(count >= 0 for count in answer)


def file_of(tensors: dict[str, Any], told: Any, data: bytes = b"") -> bytes:
    """A file of safetensors with this header."""
    header = {"__metadata__": {METADATA_KEY: json.dumps(told)}, **tensors}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def opened(content: bytes) -> tuple[dict[str, Any], Any, bytes]:
    """The parts of such a file."""
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:start])
    told = json.loads(tensors.pop("__metadata__")[METADATA_KEY])
    return tensors, told, content[start:]


@pytest.fixture(scope="module")
def honest(server) -> dict[tuple[str, int], httpx.Response]:
    """What the service answers: by the path and the place of the options."""
    answers: dict[tuple[str, int], httpx.Response] = {}
    sent: list[httpx.Response] = []

    def keep(response: httpx.Response) -> None:
        response.read()
        sent.append(response)

    with httpx.Client(event_hooks={"response": [keep]}) as http, Client(server.url, http=http) as c:
        for path in (EMBEDDINGS, STREAM, RERANK, TOKENIZE, HEALTH):
            for i, options in enumerate(ASKED if path in (EMBEDDINGS, STREAM) else [{}]):
                check_right(path, ask(c, path, **options), options)
                answers[path, i] = sent[-1]
    return answers


@pytest.mark.parametrize("path", [EMBEDDINGS, STREAM])
def test_a_space_that_could_not_be_sent_again_is_no_answer(honest, path: str) -> None:
    sent = honest[path, 0]
    headers = {"Content-Type": MEDIA_TYPE, "Vector-Space": "dense-1, spärlich-2".encode("latin-1")}
    client = client_of(answering(sent.content, **headers))
    with pytest.raises(SmartEmbedderError, match="Vector-Space is no list of ids"):
        ask(client, path)


# Numbers and shapes that have broken readers.
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


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in some JSON."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_of(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], change)
    return copy


def damage(data: st.DataObject, value: Any) -> Any:
    """The JSON with another value, a doubled one or none in some place."""
    path = data.draw(st.sampled_from(list(places_of(value))))

    def change(found: Any) -> Any:
        kind = data.draw(st.integers(0, 2))
        if kind == 0 and isinstance(found, list) and found:
            return data.draw(st.sampled_from([found[::-1], found + found[-1:], found[:-1]]))
        if kind == 1 and isinstance(found, dict) and found:
            gone = data.draw(st.sampled_from(sorted(found)))
            return {name: each for name, each in found.items() if name != gone}
        if kind == 2 and type(found) is int:
            return found + data.draw(st.sampled_from([-1, 1, 8, 2**40, 10**15]))
        return data.draw(VALUES)

    return changed(value, path, change)


def damaged_file(data: st.DataObject, content: bytes) -> bytes:
    tensors, told, numbers = opened(content)
    kind = data.draw(st.integers(0, 3))
    if kind == 0:
        told = damage(data, told)
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
    return file_of(tensors, told, numbers)


@pytest.mark.parametrize("place", range(len(ASKED)))
@pytest.mark.parametrize("path", [EMBEDDINGS, STREAM])
@settings(max_examples=60)
@given(data=st.data())
def test_damaged_vectors_are_right_or_an_error(honest, path: str, place: int, data) -> None:
    content = damaged_file(data, honest[path, place].content)
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(content)))
        content = content[:start] + data.draw(st.binary(max_size=20)) + content[start:]
    with client_of(answering(content, content_type=MEDIA_TYPE)) as client:
        try:
            found = ask(client, path, **ASKED[place])
        except SmartEmbedderError:
            return
    check_right(path, found, ASKED[place])


@pytest.mark.parametrize("path", [RERANK, TOKENIZE, HEALTH])
@settings(max_examples=60)
@given(data=st.data())
def test_damaged_json_is_right_or_an_error(honest, path: str, data) -> None:
    content = json.dumps(damage(data, honest[path, 0].json())).encode()
    with client_of(answering(content, content_type="application/json")) as client:
        try:
            found = ask(client, path)
        except SmartEmbedderError:
            return
    check_right(path, found, {})


@pytest.mark.parametrize("path", [EMBEDDINGS, STREAM, RERANK, TOKENIZE, HEALTH])
@settings(max_examples=40)
@given(
    body=st.binary(max_size=60) | VALUES.map(lambda each: json.dumps(each).encode()),
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
def test_any_bytes_are_an_error_of_the_client(path: str, body, status, headers) -> None:
    with client_of(answering(body, status, **headers)) as client:
        try:
            found = ask(client, path)
        except SmartEmbedderError as error:
            pause = error.retry_after
        else:
            check_right(path, found, {})
            return
    assert pause is None or pause >= 0


DEEP = b"[" * 5_000 + b"]" * 5_000
MANY = b"[" + b"[]," * 300_000 + b"[]]"


@pytest.mark.parametrize(
    "body", [DEEP, MANY, b'{"detail": ' + DEEP + b"}"], ids=["deep", "many", ""]
)
@pytest.mark.parametrize("path", [RERANK, TOKENIZE, HEALTH])
@pytest.mark.parametrize("status", [200, 503])
def test_deep_json_and_many_lists_are_an_error(path: str, body: bytes, status: int) -> None:
    with client_of(answering(body, status)) as client, pytest.raises(SmartEmbedderError):
        ask(client, path)


def test_vectors_of_more_or_fewer_texts_are_an_error(honest) -> None:
    body = honest[EMBEDDINGS, 0].content
    with client_of(answering(body, content_type=MEDIA_TYPE)) as client:
        assert len(client.embed(TEXTS).dense) == len(TEXTS)
        for texts in (TEXTS[:1], [*TEXTS, "another"], []):
            with pytest.raises(SmartEmbedderError, match="the vectors cannot be read"):
                client.embed(texts)


@pytest.mark.parametrize(
    ("changes", "told"),
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
def test_a_ranking_of_other_passages_is_an_error(honest, changes, told: str) -> None:
    answer = honest[RERANK, 0].json()
    answer["results"].sort(key=lambda each: each["index"])
    for i, each in enumerate(answer["results"]):
        each |= {"score": float(-i), "parts": None, **changes.get(i, {})}
    body = json.dumps(answer).encode()
    with client_of(answering(body)) as client, pytest.raises(SmartEmbedderError, match=told):
        ask(client, RERANK)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda records: records, "more than a record for each text"),
        (lambda records: records[::-1], "the record 2 in the place of 0"),
        (lambda records: [records[0], records[0], records[2]], "the record 0 in the place of 1"),
        (lambda records: [{"id": f"{each['id']}"} for each in records], "the record '0'"),
        (lambda _: [{}] * 3, "KeyError"),
        (lambda _: [], "without records"),
        (lambda _: [{"id": 0, "error": {"detail": 1, "code": [], "status": "x"}}], "tensors"),
    ],
)
def test_records_of_other_texts_are_an_error(honest, change, told: str) -> None:
    tensors, facts, numbers = opened(honest[STREAM, 0].content)
    body = file_of(tensors, facts | {"records": change(facts["records"])}, numbers)
    if told.startswith("more than"):
        body *= 2
    with (
        client_of(answering(body, content_type=MEDIA_TYPE)) as client,
        pytest.raises(SmartEmbedderError, match=told),
    ):
        ask(client, STREAM)


class Endless:
    """Pieces without end, which are counted."""

    def __init__(self, piece: bytes) -> None:
        self._piece = piece
        self.bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self.bytes += len(self._piece)
            yield self._piece


MOST = {
    EMBEDDINGS: limits.of_vectors(TEXTS, {}),
    STREAM: limits.of_vectors(TEXTS, {}),
    RERANK: limits.of_ranking("river", TEXTS),
    TOKENIZE: limits.of_tokens(TEXTS),
}
NO_RECORDS = file_of({}, {"output_dtype": "float32", "records": []})
ANNOUNCED = file_of(
    {"dense": {"dtype": "U8", "shape": [10**15], "data_offsets": [0, 10**15]}},
    {"output_dtype": "float32", "records": [{"id": 0}]},
)


@pytest.mark.parametrize("connect", ["threads", "asyncio"])
@pytest.mark.parametrize(
    ("path", "piece"),
    [
        (EMBEDDINGS, bytes(65_536)),
        (EMBEDDINGS, b"\xff\xff\x0f\x00\x00\x00\x00\x00" + b" " * 65_528),
        (STREAM, NO_RECORDS),
        (STREAM, ANNOUNCED),
        (STREAM, bytes(65_536)),
        (STREAM, b"\xff\xff\xff\x00\x00\x00\x00\x00" + b" " * 65_528),
        (RERANK, b" " * 65_536),
        (TOKENIZE, b" " * 65_536),
        (HEALTH, b" " * 65_536),
    ],
)
@pytest.mark.parametrize("status", [200, 503])
def test_an_answer_without_end_is_read_no_further_than_an_honest_one(
    path: str, piece: bytes, status: int, connect: str
) -> None:
    body = Endless(piece)
    transport = answering(iter(body), status, content_type=MEDIA_TYPE)

    async def with_asyncio() -> None:
        http = httpx.AsyncClient(transport=transport)
        async with AsyncClient(URL, max_retries=0, http=http) as client:
            if path == STREAM:
                async for _ in client.embed_stream(TEXTS):
                    pass
            else:
                await ask(client, path)  # type: ignore[arg-type]

    def with_threads() -> None:
        with client_of(transport) as client:
            ask(client, path)

    run = with_threads if connect == "threads" else lambda: asyncio.run(with_asyncio())
    with pytest.raises(SmartEmbedderError, match="unexpected_answer"):
        run()
    most = MOST.get(path, limits.SMALL) if status == 200 else limits.SMALL
    # A stream asks a second time for what is refused early.
    assert body.bytes <= 2 * (most.bytes + 2 * len(piece))


def shared_tensors(honest) -> tuple[bytes, dict[str, str], int]:
    """A megabyte of bfloat16, named two thousand times, would become two gigabytes of float32."""
    tensors, told, _ = opened(honest[EMBEDDINGS, 0].content)
    shared = {"dtype": "BF16", "shape": [3, 170_000], "data_offsets": [0, 1_020_000]}
    tensors = {f"t{i}": shared for i in range(2_000)} | {"dense": shared}
    body = file_of(tensors, told | {"output_dtype": "bfloat16"}, bytes(1_020_000))
    return body, {}, 20 * len(body)


def compressed(_honest) -> tuple[bytes, dict[str, str], int]:
    """An answer that nobody asked to be compressed is not unpacked."""
    return gzip.compress(bytes(50_000_000)), {"content_encoding": "gzip"}, 2_000_000


def many_lists(honest) -> tuple[bytes, dict[str, str], int]:
    """Each takes two bytes, and sixty in memory: they are counted before they are made."""
    tensors, told, numbers = opened(honest[EMBEDDINGS, 0].content)
    body = file_of(tensors, told | {"usage": [[]] * 500_000}, numbers)
    return body, {}, 8 * len(body)


@pytest.mark.parametrize("make", [shared_tensors, compressed, many_lists])
def test_an_answer_does_not_become_many_times_its_size(honest, make) -> None:
    body, headers, most = make(honest)
    with client_of(answering(body, content_type=MEDIA_TYPE, **headers)) as client:
        tracemalloc.start()
        try:
            with pytest.raises(SmartEmbedderError, match=r"compressed \(gzip\)|has more than the"):
                client.embed(TEXTS, output_dtype="bfloat16")
            assert tracemalloc.get_traced_memory()[1] < most
        finally:
            tracemalloc.stop()

"""Post-processed vectors, their memory, and answers as JSON in messages of bounded size."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from app import answers as rendering
from app.answers import (
    ChunkedResponse,
    join_or_split_chunks,
    ranked_scores,
    render_matrix,
    render_rerank,
    reserve_rendering_memory,
    sparse_as_json,
    text_as_json,
    truncation_as_json,
    vector_as_json,
    vectors_of,
)
from smart_embedder.requests import AnswerMemory, EmbedRequest, Outputs
from smart_embedder.results import (
    PartScores,
    RerankResult,
    SparseVector,
    TextEmbedding,
    Timings,
    TokenStrings,
    Truncation,
)
from smart_embedder.vectors import quantize

MESSAGE, WHOLE = 262_144, 4 << 20


def test_rerank_responses_follow_the_ranking_of_the_result() -> None:
    result = RerankResult([1.0, 1.0, 0.5], [1, 0, 2], None, [], 0, Timings(0, 0, 0, 0))
    ranked = ranked_scores(result)
    assert ranked == [(1, 1.0), (0, 1.0), (2, 0.5)]
    assert all(isinstance(score, np.float32) for _, score in ranked)


@given(st.text('a"\\\n\x00é\U0001f600'))
def test_a_long_text_is_rendered_in_parts_with_the_same_json(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "_CHARACTERS_PER_PART", 3)
        assert orjson.dumps({"text": text_as_json(text)}) == orjson.dumps({"text": text})


# Messages.


@given(st.lists(st.integers(0, 40), max_size=30))
def test_small_chunks_are_joined_and_large_chunks_split(sizes: list[int]) -> None:
    chunks = [bytes([65 + number % 26]) * size for number, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "_MESSAGE_BYTES", 10)
        messages = list(join_or_split_chunks(chunks))
    assert b"".join(messages) == b"".join(chunks)
    assert max(map(len, messages), default=0) < 20
    assert len(messages) <= sum(sizes) / 10 * 3 + 1


class Exchange:
    """A client that may be slow, or disconnect; records the messages of the response."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leaves_after = 10**9

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def is_closing(self) -> bool:
        return len(self.sent) > self.leaves_after

    async def read(
        self, render: Callable[[], Iterable[bytes]], *, measured: bool = False
    ) -> "Exchange":
        with ThreadPoolExecutor(1) as threads:
            scope = {
                "type": "http",
                "http_version": "1.0" if measured else "1.1",
                "headers": [],
                "state": {"is_closing": self.is_closing},
            }
            response = ChunkedResponse(render, Request(scope), threads)
            await response(scope, None, self.send)  # type: ignore[arg-type]
        return self

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def more(self) -> list[bool]:
        return [message["more_body"] for message in self.sent[1:]]


async def test_a_small_response_has_a_content_length() -> None:
    for size in (0, 5, MESSAGE, WHOLE - 1, WHOLE):
        chunks = [b"a" * 1000] * (size // 1000) + [b"b" * (size % 1000)]
        read = await Exchange().read(lambda chunks=chunks: chunks)
        assert read.sent[0]["status"] == 200
        assert read.headers[b"content-type"] == b"application/json"
        assert read.headers[b"content-length"] == b"%d" % size
        assert read.body == b"".join(chunks)
        assert read.more == [True] * (len(read.more) - 1) + [False]
        assert len(read.more) == 1 or size >= MESSAGE


@pytest.mark.parametrize("measured", [False, True])
async def test_a_large_response_is_rendered_while_the_client_reads_it(*, measured: bool) -> None:
    read, rendered_before = Exchange(), list[int]()

    def chunks() -> Iterator[bytes]:
        for _ in range(80):
            rendered_before.append(len(read.sent))
            yield b"a" * 100_000

    await read.read(chunks, measured=measured)
    announced = read.headers.get(b"content-length")
    assert announced == (b"8000000" if measured else None)
    assert read.body == b"a" * 8_000_000
    assert read.more == [True] * (len(read.more) - 1) + [False]
    at_once = WHOLE / 100_000 + (80 if measured else 0)
    assert rendered_before.count(0) == pytest.approx(at_once, abs=4), "the beginning"
    assert len(set(rendered_before)) > 10, "and the rest as fast as the client reads"


async def test_rendering_stops_when_the_client_disconnects() -> None:
    read, rendered = Exchange(), list[int]()
    read.leaves_after = 25
    chunks = ((rendered.append(i) or b"a" * 100_000) for i in range(10_000))
    await asyncio.wait_for(read.read(lambda: chunks), 60)
    assert len(rendered) < 100


# Numbers.


def test_the_rows_of_a_matrix_are_rendered_in_chunks(monkeypatch) -> None:
    monkeypatch.setattr(rendering, "_FLOATS_PER_CHUNK", 8)
    for shape in ((0, 4), (1, 4), (2, 4), (3, 4), (9, 4), (2, 9)):
        matrix = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 3
        pieces = list(render_matrix(matrix))
        whole = orjson.dumps(matrix, option=orjson.OPT_SERIALIZE_NUMPY)
        assert b"".join(pieces) == whole
        assert max(piece.count(b"[") for piece in pieces) <= 2
    assert b"".join(render_matrix(None)) == b"null"


def test_sparse_vectors_are_an_object_or_two_lists_and_base64_has_the_bytes() -> None:
    sparse = SparseVector(np.array([7, 3], np.int64), np.float32([0.1, 2.5]))
    as_object = orjson.dumps(sparse_as_json(sparse, as_indices=False), option=rendering.OPTIONS)
    as_lists = orjson.dumps(sparse_as_json(sparse, as_indices=True), option=rendering.OPTIONS)
    assert as_object == b'{"7":0.1,"3":2.5}'
    assert as_lists == b'{"indices":[7,3],"values":[0.1,2.5]}'
    assert sparse_as_json(None, as_indices=True) is None
    assert vector_as_json(np.float32([1, -2]), as_base64=True) == "AACAPwAAAMA="


def test_a_rerank_response_has_parts_timings_usage_and_warnings() -> None:
    parts = [PartScores(0.1, None, 0.3), PartScores(0.5, 0.25, None)]
    cut = [Truncation("passages", 1, "m", 8, 11)]
    result = RerankResult([0.5, 0.25], [0, 1], parts, cut, 9, Timings(0.001, 0.02, 0.3, 0.4000006))
    answer = orjson.loads(b"".join(render_rerank(["a", "b"], result, {"model_name": "name"})))
    assert answer.pop("results") == [
        {"index": 0, "passage": "a", "score": 0.5,
         "parts": {"dense": 0.1, "sparse": None, "colbert": 0.3}},
        {"index": 1, "passage": "b", "score": 0.25,
         "parts": {"dense": 0.5, "sparse": 0.25, "colbert": None}},
    ]  # fmt: skip
    (warning,) = answer.pop("warnings")
    assert warning["code"] == "passage_truncated"
    assert answer == {
        "model_name": "name",
        "processing_time_ms": 400.001,
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
        "timings_ms": {"tokenize": 1.0, "queue": 20.0, "inference": 300.0, "total": 400.001},
    }


@pytest.mark.parametrize(
    ("cut", "field", "pointer", "expected"),
    [
        (Truncation("sentences", 2, "m", 8, 11), "input", None,
         ("input_truncated", "/input/2", "has 11 tokens; m read the first 8.", "end", None)),
        (Truncation("query", 0, "m", 8, 11, exact=False), "query", None,
         ("query_truncated", "/query", "has at least 11 tokens; m read the first 8.", "end", True)),
        (Truncation("passages", 1, "m", 8, 11, side="left"), "texts", "/text",
         ("passage_truncated", "/text", "has 11 tokens; m read the last 8.", "start", None)),
    ],
)  # fmt: skip
def test_a_truncation_warning_names_the_text_the_side_and_the_tokens(cut, field, pointer, expected):
    code, place, reads, side, bound = expected
    warning = truncation_as_json(cut, field, pointer)
    assert warning["message"] == f"The text at {place} {reads}"
    assert (warning["code"], warning["severity"]) == (code, "warning")
    assert warning["target"] == {"field": field, "index": cut.index, "pointer": place}
    details = warning["details"]
    assert details.pop("lower_bound", None) == bound
    assert details == {
        "model": "m",
        "max_tokens": 8,
        "original_tokens": 11,
        "truncated_tokens": 3,
        "truncation_side": side,
    }


# Post-processing of the vectors.

ALL = Outputs(dense=True, sparse=True, colbert=True)
DTYPES = ["float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"]


def embed_request(outputs: Outputs, **fields: Any) -> EmbedRequest:
    return EmbedRequest([], outputs, **fields)


def embedding_of(tokens: int, width: int = 16) -> TextEmbedding:
    random = np.random.default_rng(tokens)
    colbert = random.normal(size=(tokens, width)).astype(np.float32)
    weights = SparseVector(np.arange(tokens), np.ones(tokens, np.float32))
    return TextEmbedding(np.ones(width, np.float32), weights, colbert)


class Held(AnswerMemory):
    """Records the sizes of all requests for memory."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[int] = []

    def reserve(self, size: int, what: str, advice: str) -> None:
        super().reserve(size, what, advice)
        self.requested.append(size)


@given(
    st.lists(st.integers(1, 30), max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from([None, 2, 5]),
    st.sampled_from([None, "document"]),
    st.booleans(),
)
@settings(max_examples=40)
def test_memory_is_reserved_for_quantization_pooling_and_muvera(
    texts, dtype, factor, muvera, at_once
) -> None:
    options = embed_request(ALL, output_dtype=dtype, colbert_pool_factor=factor, muvera=muvera)
    embeddings = [embedding_of(tokens) for tokens in texts]
    memory = Held()
    reserve_rendering_memory(embeddings, options, memory, at_once=at_once)
    pooling = max((4 * tokens**2 for tokens in texts), default=0) if factor else 0
    (held,) = memory.requested
    processed = 0
    for embedding in embeddings:
        vectors = vectors_of(embedding, options)
        new = vectors.nbytes - 8 * embedding.sparse.indices.size
        processed += new if dtype != "float32" else (0 if vectors.muvera is None else 40_960)
    assert held - pooling >= (processed if at_once else 0)
    # At most half of float32, and the vector of MUVERA.
    most = [
        (e.nbytes // 2 if dtype != "float32" else 0) + 40_960 * bool(muvera) for e in embeddings
    ]
    assert held - pooling == (sum(most) if at_once else max(most, default=0))


DENSE = Outputs(dense=True)


def test_muvera_needs_colbert_vectors_that_the_response_may_leave_out() -> None:
    request = embed_request(DENSE, muvera="query")
    assert request.needed == replace(DENSE, colbert=True)
    assert (embed_request(DENSE).needed, embed_request(ALL).needed) == (DENSE, ALL)
    vectors = vectors_of(embedding_of(5), request)
    assert vectors.colbert is None
    assert vectors.muvera is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_dense_and_colbert_vectors_are_quantized(dtype) -> None:
    embedding = embedding_of(6)
    request = embed_request(ALL, output_dtype=dtype, colbert_pool_factor=3)
    vectors = vectors_of(embedding, request, TokenStrings(["a"], None))
    np.testing.assert_array_equal(vectors.dense.values, quantize(embedding.dense, dtype).values)
    assert (vectors.colbert.dtype, len(vectors.colbert.values)) == (dtype, 2)
    assert vectors.sparse is embedding.sparse
    assert vectors.tokens == TokenStrings(["a"], None)
    values = vectors.dense.values.nbytes + vectors.colbert.values.nbytes
    assert vectors.nbytes == values + 6 * 8
    none = vectors_of(TextEmbedding(), replace(request, muvera="document"))
    assert (none.dense, none.sparse, none.colbert, none.muvera, none.nbytes) == (None,) * 4 + (0,)

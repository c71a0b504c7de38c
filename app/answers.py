"""Renders results as JSON with orjson, in chunks, and sends responses of chunks.

orjson holds the GIL while it renders a chunk, a few milliseconds at most; the event loop runs
between chunks. The JSON of a vector is several times as large as its numbers, so a large response
is rendered while the client reads it.
"""

import asyncio
from binascii import b2a_base64
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from smart_embedder import requests as records
from smart_embedder.interface import LoadedModels
from smart_embedder.results import (
    EmbeddingResult,
    ExtractionResult,
    FloatArray,
    RerankResult,
    Span,
    SparseVector,
    TextEmbedding,
    Timings,
    TokenStrings,
    Truncation,
)
from smart_embedder.vector_space import VECTORS
from smart_embedder.vectors import (
    MUVERA_WIDTH,
    QuantizedVectors,
    muvera_of,
    pool,
    pooling_bytes,
    quantize,
)

# The key of the report, as JSON, in formats that have metadata.
METADATA_KEY = "smart-embedder"
# An index and a value.
_WEIGHT_BYTES = 4 + 4
# Bytes of an array that are encoded at once: a multiple of three.
_BASE64_BYTES = 3 << 16

_FLOATS_PER_CHUNK = _CHARACTERS_PER_PART = 65_536
_MESSAGE_BYTES = 262_144
# Up to this size, a response is rendered before it is sent, and has a Content-Length.
WHOLE_BYTES = 4 << 20
JSON = "application/json"
# The items of a memoryview are single bytes.
Chunk = bytes | memoryview
OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_WARNING_CODES = {
    "sentences": "input_truncated",
    "query": "query_truncated",
    "passages": "passage_truncated",
}


class ChunkedResponse(Response):
    """A response rendered and sent in chunks; small chunks are joined, large ones split.

    The beginning is rendered at once, the rest on one of `threads` as fast as the client reads. An
    HTTP/1.0 client needs a Content-Length to tell the end of a response from a broken connection,
    so a large response is then rendered twice, the first time only for its length.
    """

    def __init__(
        self,
        render: Callable[[], Iterable[Chunk]],
        request: Request,
        threads: Executor,
        media_type: str = JSON,
    ) -> None:
        self._threads = threads
        headers = dict[str, str]()
        length = self._begin(render())
        self._is_whole = length is not None
        if length is None and request.scope["http_version"] == "1.0":
            length = sum(map(len, render()))
        if length is not None:
            headers["Content-Length"] = str(length)
        super().__init__(media_type=media_type, headers=headers)
        if length is None:
            del self.headers["content-length"]

    def _begin(self, chunks: Iterable[Chunk]) -> int | None:
        """Render the beginning; return the size of the response, or None if it is large."""
        self._rest = join_or_split_chunks(chunks)
        self._begun: deque[Chunk] = deque()
        size = 0
        for message in self._rest:
            self._begun.append(message)
            size += len(message)
            if size > WHOLE_BYTES:
                return None
        return size

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the start, then every message; free each message once it is sent."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        is_closing = scope["state"].get("is_closing", bool)
        while self._begun:
            body = self._begun.popleft()
            more = bool(self._begun) or not self._is_whole
            await send({"type": "http.response.body", "body": body, "more_body": more})
        if self._is_whole:
            return
        loop, render_next = asyncio.get_running_loop(), partial(next, self._rest, None)
        while not is_closing():
            chunk = await loop.run_in_executor(self._threads, render_next)
            if chunk is None:
                break
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def join_or_split_chunks(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Join small chunks to messages; split a chunk larger than a message without copying it."""
    joined: list[Chunk] = []
    size = 0
    for chunk in chunks:
        if len(chunk) > _MESSAGE_BYTES:
            yield b"".join(joined)
            whole = memoryview(chunk)
            yield from (whole[i : i + _MESSAGE_BYTES] for i in range(0, len(chunk), _MESSAGE_BYTES))
            joined, size = [], 0
            continue
        joined.append(chunk)
        size += len(chunk)
        if size >= _MESSAGE_BYTES:
            yield b"".join(joined)
            joined, size = [], 0
    yield b"".join(joined)


def render_matrix(matrix: npt.NDArray[Any] | None) -> Iterator[bytes]:
    """Render the rows of a matrix as JSON, some at a time."""
    if matrix is None:
        yield b"null"
        return
    rows = max(1, _FLOATS_PER_CHUNK // matrix.shape[1])
    yield b"["
    for start in range(0, len(matrix), rows):
        if start:
            yield b","
        yield orjson.dumps(matrix[start : start + rows], option=OPTIONS)[1:-1]
    yield b"]"


def render_items(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Render a list as JSON; the chunks of each item are JSON already."""
    yield b"["
    for index, chunks in enumerate(items):
        if index:
            yield b","
        yield from chunks
    yield b"]"


def render_object(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """Render an object as JSON; the chunks of a value that is an iterator are JSON already."""
    separator = b"{"
    for name, value in fields.items():
        yield b'%b"%b":' % (separator, name.encode())
        if isinstance(value, Iterator):
            yield from value
        else:
            yield orjson.dumps(value, option=OPTIONS)
        separator = b","
    yield b"}"


def render_list(items: Iterable[Any]) -> Iterator[bytes]:
    """Render a list as JSON, item by item."""
    return render_items((orjson.dumps(item, option=OPTIONS),) for item in items)


def text_as_json(text: object) -> str | orjson.Fragment | None:
    """The text for orjson, None for a picture.

    A long text is rendered in parts, because orjson holds the GIL while it renders.
    """
    if not isinstance(text, str):
        return None
    if len(text) <= _CHARACTERS_PER_PART:
        return text
    starts = range(0, len(text), _CHARACTERS_PER_PART)
    parts = (orjson.dumps(text[start : start + _CHARACTERS_PER_PART])[1:-1] for start in starts)
    return orjson.Fragment(b'"%b"' % b"".join(parts))


def vector_as_json(vector: npt.NDArray[Any], *, as_base64: bool) -> Any:
    """The vector for orjson with `OPTIONS`: numbers, or little-endian bytes in base64."""
    return b2a_base64(vector.data, newline=False).decode() if as_base64 else vector


def sparse_as_json(sparse: SparseVector | None, *, as_indices: bool) -> dict[Any, Any] | None:
    """The weights for orjson with `OPTIONS`: by token id, or as indices and values."""
    if sparse is None:
        return None
    if as_indices:
        return {"indices": sparse.indices, "values": sparse.values}
    # Iterating keeps float32, whose shortest distinct digits orjson writes.
    return dict(zip(sparse.indices.tolist(), sparse.values, strict=True))


def render_rerank(
    passages: Sequence[str | records.ImageInput], result: RerankResult, about: dict[str, Any]
) -> Iterator[bytes]:
    """Render the response to a rerank request, by falling score; the fields `about` follow."""

    def rank_passages() -> Iterator[dict[str, Any]]:
        for index, score in ranked_scores(result):
            passage = text_as_json(passages[index])
            item: dict[str, Any] = {"index": index, "passage": passage, "score": score}
            if result.parts is not None:
                parts = asdict(result.parts[index])
                item["parts"] = {kind: np.float32(part) for kind, part in parts.items()}
            yield item

    return render_object({"results": render_list(rank_passages())} | about | report(result))


def ranked_scores(result: RerankResult) -> list[tuple[int, np.float32]]:
    """Return the indices of passages and their scores for the response, the best first."""
    return [(index, np.float32(result.scores[index])) for index in result.ranking]


def render_spans(result: ExtractionResult, about: dict[str, Any]) -> Iterator[bytes]:
    """Render the spans of each text; the fields `about` follow."""
    rows = (
        render_object({"id": index, "spans": render_list(map(span_as_json, spans))})
        for index, spans in enumerate(result.spans)
    )
    return render_object({"data": render_items(rows)} | about | report(result))


def span_as_json(span: Span) -> dict[str, Any]:
    """The span for orjson."""
    return asdict(span) | {"text": text_as_json(span.text), "score": np.float32(span.score)}


def report(result: EmbeddingResult | RerankResult | ExtractionResult) -> dict[str, Any]:
    """The fields of every native response besides its results: times, warnings and usage."""
    timings = timings_as_json(result.timings)
    return {
        "processing_time_ms": timings["total"],
        "warnings": [
            *(truncation_as_json(found, found.field) for found in result.truncations),
            *map(replacement_as_json, result.replaced),
        ],
        "usage": usage_as_json(result.tokens),
        "timings_ms": timings,
    }


def usage_as_json(tokens: int) -> dict[str, int]:
    """OpenAI's `usage` object, which many APIs share."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def timings_as_json(timings: Timings) -> dict[str, float]:
    """Each stage in milliseconds, rounded to microseconds."""
    stages = ("tokenize", "queue", "inference", "total")
    return {stage: round(getattr(timings, stage) * 1000, 3) for stage in stages}


def truncation_as_json(
    truncation: Truncation, field: str, pointer: str | None = None
) -> dict[str, Any]:
    """The warning about a truncated text.

    `field` is the dialect's name for the list of texts. `pointer` is given for a text outside a
    list.
    """
    index, is_end = truncation.index, truncation.side == "right"
    if pointer is None:
        pointer = "/query" if field == "query" else f"/{field}/{index}"
    count = "" if truncation.exact else "at least "
    read = "the first" if is_end else "the last"
    details = {
        "model": truncation.model,
        "max_tokens": truncation.max_tokens,
        "original_tokens": truncation.original_tokens,
        "truncated_tokens": truncation.truncated_tokens,
        "truncation_side": "end" if is_end else "start",
    }
    return {
        "code": _WARNING_CODES[truncation.field],
        "severity": "warning",
        "message": f"The text at {pointer} has {count}{truncation.original_tokens} tokens; "
        f"{truncation.model} read {read} {truncation.max_tokens}.",
        "target": {"field": field, "index": index, "pointer": pointer},
        "details": details if truncation.exact else details | {"lower_bound": True},
    }


def replacement_as_json(pointer: str) -> dict[str, Any]:
    """The warning that lone surrogates in a string of the request were read as U+FFFD."""
    _, field, *inner = pointer.split("/")
    index = int(inner[0]) if inner and inner[0].isdecimal() else 0
    return {
        "code": "surrogate_replaced",
        "severity": "warning",
        "message": f"The text at {pointer} has lone surrogates, which were read as U+FFFD.",
        "target": {"field": field, "index": index, "pointer": pointer},
    }


def reserve_rendering_memory(
    embeddings: Sequence[TextEmbedding],
    request: records.EmbedRequest,
    memory: records.AnswerMemory,
    *,
    at_once: bool = False,
) -> None:
    """Reserve the memory of post-processing: one text after the other, or all `at_once`.

    Raises as `AnswerMemory.reserve` does.
    """
    pooling = processed = 0
    for embedding in embeddings:
        if request.colbert_pool_factor is not None and embedding.colbert is not None:
            pooling = max(pooling, pooling_bytes(len(embedding.colbert)))
        size = 0 if request.output_dtype == "float32" else embedding.nbytes // 2
        size += 0 if request.muvera is None else 4 * MUVERA_WIDTH
        processed = processed + size if at_once else max(processed, size)
    advice = "send shorter texts, or leave out colbert_pool_factor"
    memory.reserve_more(pooling + processed, "the vectors and their post-processing", advice)


@dataclass(frozen=True, slots=True)
class TextVectors:
    """The post-processed vectors of one text; None for a kind that was not requested."""

    dense: QuantizedVectors | None
    sparse: SparseVector | None
    colbert: QuantizedVectors | None
    muvera: FloatArray | None
    tokens: TokenStrings | None

    @property
    def nbytes(self) -> int:
        """The approximate size in bytes, without the strings."""
        quantized = (self.dense, self.colbert)
        sizes = [vectors.values.nbytes for vectors in quantized if vectors is not None]
        sparse = 0 if self.sparse is None else self.sparse.indices.size * _WEIGHT_BYTES
        return sum(sizes) + sparse + (0 if self.muvera is None else self.muvera.nbytes)


@dataclass(frozen=True, slots=True)
class EmbeddingAnswer:
    """A response before it is rendered; `describe_models` makes its `model_fields`."""

    request: records.EmbedRequest
    result: EmbeddingResult
    model_fields: Mapping[str, Any]

    def vectors(self) -> Iterator[TextVectors]:
        """Post-process the vectors of one text after the other while the response is rendered."""
        strings = self.result.token_strings or repeat(None, len(self.request.texts))
        for embedding, tokens in zip(self.result.embeddings, strings, strict=True):
            yield vectors_of(embedding, self.request, tokens)

    def report(self) -> dict[str, Any]:
        """The fields besides vectors: models, usage, times, warnings and the type of numbers."""
        return {
            **self.model_fields,
            **report(self.result),
            "output_dtype": self.request.output_dtype,
        }


def vectors_of(
    embedding: TextEmbedding,
    request: records.EmbedRequest,
    tokens: TokenStrings | None = None,
) -> TextVectors:
    """Post-process the vectors of one text."""
    dense, colbert, muvera = embedding.dense, embedding.colbert, None
    if colbert is not None and request.muvera is not None:
        muvera = muvera_of(colbert.shape[1]).encode(colbert, request.muvera)
    if not request.outputs.colbert:
        colbert = None
    if colbert is not None and request.colbert_pool_factor is not None:
        colbert = pool(colbert, request.colbert_pool_factor)
    return TextVectors(
        dense=None if dense is None else quantize(dense, request.output_dtype),
        sparse=embedding.sparse,
        colbert=None if colbert is None else quantize(colbert, request.output_dtype),
        muvera=muvera,
        tokens=tokens,
    )


def render_embeddings(
    answer: EmbeddingAnswer, *, sparse_as_indices: bool, as_base64: bool
) -> Iterator[bytes]:
    """Render the response to an embedding request."""
    yield b'{"data":['
    texts = answer.request.texts
    for index, (text, row) in enumerate(zip(texts, answer.vectors(), strict=True)):
        if index:
            yield b","
        fields = {"id": index, "text": text_as_json(text)}
        yield from render_item(
            fields, row, sparse_as_indices=sparse_as_indices, as_base64=as_base64
        )
    report_fields = answer.report()
    if answer.request.output_dtype == "float32" and not as_base64:
        del report_fields["output_dtype"]
    yield b"]," + orjson.dumps(report_fields)[1:]


def render_item(
    fields: Mapping[str, Any], row: TextVectors, *, sparse_as_indices: bool, as_base64: bool
) -> Iterator[bytes]:
    """Render the object of one text: `fields`, its vectors and its tokens."""
    sparse = row.sparse
    yield orjson.dumps(fields)[:-1] + b',"embeddings":{'
    yield from render_vectors("dense", row.dense, as_base64=as_base64)
    yield b',"sparse":'
    if as_base64 and sparse is not None:
        yield b'{"indices":'
        yield from _as_base64(sparse.indices.astype(np.uint32))
        yield b',"values":'
        yield from _as_base64(sparse.values)
        yield b"}"
    else:
        weights = sparse_as_json(sparse, as_indices=sparse_as_indices)
        yield orjson.dumps(weights, option=OPTIONS)
    yield b","
    yield from render_vectors("colbert", row.colbert, as_base64=as_base64)
    if row.muvera is not None:
        yield b',"muvera":'
        if as_base64:
            yield from _as_base64(row.muvera)
        else:
            yield orjson.dumps(row.muvera, option=OPTIONS)
    yield b"}"
    if row.tokens is not None:
        strings: Any = row.tokens.sparse
        if strings is not None and sparse is not None and not (sparse_as_indices or as_base64):
            strings = dict(zip(sparse.indices.tolist(), strings, strict=True))
        tokens = {"sparse": strings, "colbert": row.tokens.colbert}
        yield b',"tokens":' + orjson.dumps(tokens, option=OPTIONS)
    yield b"}"


def render_vectors(
    name: str, vectors: QuantizedVectors | None, *, as_base64: bool = False
) -> Iterator[bytes]:
    """Render the field `name` of an object and, for types of numbers that have them, its scales."""
    yield b'"%s":' % name.encode()
    if vectors is None:
        yield b"null"
        return
    if as_base64:
        yield from _as_base64(vectors.values, vectors.type_name)
    elif vectors.values.ndim == 1:
        yield orjson.dumps(vectors.values, option=OPTIONS)
    else:
        yield from render_matrix(vectors.values)
    if vectors.scales is not None:
        # orjson cannot render an array without dimensions.
        scales = vectors.scales if vectors.scales.ndim else vectors.scales[()]
        yield b',"%s_scale":' % name.encode() + orjson.dumps(scales, option=OPTIONS)


def _as_base64(values: npt.NDArray[Any], type_name: str | None = None) -> Iterator[bytes]:
    """Render an array as base64, in pieces whose length is a multiple of three bytes."""
    head = orjson.dumps({"dtype": type_name or values.dtype.name, "shape": values.shape})
    yield head[:-1] + b',"data":"'
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    for start in range(0, len(content), _BASE64_BYTES):
        yield b2a_base64(content[start : start + _BASE64_BYTES], newline=False)
    yield b'"}'


def describe_models(models: LoadedModels, spaces: Mapping[str, str]) -> dict[str, Any]:
    """The model and the vector space of each kind of vectors, as fields of a response."""
    dense, embedder = models.dense_model.name, models.embedder.name
    return {
        "model_name": dense,
        "dense_model_name": dense,
        "sparse_model_name": embedder,
        "colbert_model_name": embedder,
        "vector_space": {kind: spaces.get(kind) for kind in VECTORS},
    }

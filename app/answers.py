"""Rendering results to JSON by orjson, in chunks, and responses of chunks.

A chunk takes a few milliseconds at most, during which orjson holds the GIL; the event loop runs
between chunks. The text of a vector is several times as large as its numbers, so a large answer is
rendered while the client reads it.
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
    FloatArray,
    RerankResult,
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

# Under which formats with metadata hold the report, as JSON.
METADATA_KEY = "smart-embedder"
# An index and a value.
_WEIGHT_BYTES = 4 + 4
# Of an array, in one piece: a multiple of three.
_BASE64_BYTES = 3 << 16

_FLOATS_PER_CHUNK = _CHARACTERS_PER_PART = 65_536
_MESSAGE_BYTES = 262_144
# Up to this size an answer is rendered before it is sent, and has a Content-Length.
WHOLE_BYTES = 4 << 20
JSON = "application/json"
# Of bytes: a memoryview has items of one byte.
Chunk = bytes | memoryview
OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_WARNING_CODES = {
    "sentences": "input_truncated",
    "query": "query_truncated",
    "passages": "passage_truncated",
}


class ChunkedResponse(Response):
    """A response sent as the chunks it is rendered in; small ones are joined, large ones split.

    The beginning is rendered at once, and the rest on one of `threads` as fast as the client reads.
    For HTTP/1.0, which has no other way to tell the end of an answer from a broken connection, it
    is rendered twice, first for its length alone.
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
        """Render the beginning of these; return the size of the whole, None if that is large."""
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
        """Send the start, then every message; keep none that is sent."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        has_left = scope["state"].get("is_closing", bool)
        while self._begun:
            body = self._begun.popleft()
            more = bool(self._begun) or not self._is_whole
            await send({"type": "http.response.body", "body": body, "more_body": more})
        if self._is_whole:
            return
        loop, render_next = asyncio.get_running_loop(), partial(next, self._rest, None)
        while not has_left():
            chunk = await loop.run_in_executor(self._threads, render_next)
            if chunk is None:
                break
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def join_or_split_chunks(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Join small chunks to messages; split a chunk that is larger than one without copying it."""
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
    """JSON of the rows, piece by piece."""
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
    """JSON of a list, whose items are rendered as chunks."""
    yield b"["
    for index, chunks in enumerate(items):
        if index:
            yield b","
        yield from chunks
    yield b"]"


def render_object(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """JSON of an object, in which an iterator stands for the chunks of a value's JSON."""
    mark = b"{"
    for name, value in fields.items():
        yield b'%b"%b":' % (mark, name.encode())
        if isinstance(value, Iterator):
            yield from value
        else:
            yield orjson.dumps(value, option=OPTIONS)
        mark = b","
    yield b"}"


def render_list(items: Iterable[Any]) -> Iterator[bytes]:
    """JSON of a list, item by item."""
    return render_items((orjson.dumps(item, option=OPTIONS),) for item in items)


def text_as_json(text: str) -> str | orjson.Fragment:
    """For orjson, which holds Python's lock while it writes a text: a long one, in parts."""
    if len(text) <= _CHARACTERS_PER_PART:
        return text
    starts = range(0, len(text), _CHARACTERS_PER_PART)
    parts = (orjson.dumps(text[start : start + _CHARACTERS_PER_PART])[1:-1] for start in starts)
    return orjson.Fragment(b'"%b"' % b"".join(parts))


def vector_as_json(vector: npt.NDArray[Any], *, as_base64: bool) -> Any:
    """For orjson with `OPTIONS`: its numbers, or its bytes, little-endian, in base64."""
    return b2a_base64(vector.data, newline=False).decode() if as_base64 else vector


def sparse_as_json(sparse: SparseVector | None, *, as_indices: bool) -> dict[Any, Any] | None:
    """For orjson with `OPTIONS`."""
    if sparse is None:
        return None
    if as_indices:
        return {"indices": sparse.indices, "values": sparse.values}
    # Iterating keeps float32, of which orjson writes the shortest distinct digits.
    return dict(zip(sparse.indices.tolist(), sparse.values, strict=True))


def render_rerank(
    passages: list[str], result: RerankResult, about: dict[str, Any]
) -> Iterator[bytes]:
    """The chunks of the JSON answer to a rerank request, by falling score; it ends in `about`."""

    def ranked() -> Iterator[dict[str, Any]]:
        for index, score in rank_by_score(result.scores):
            passage = text_as_json(passages[index])
            item: dict[str, Any] = {"index": index, "passage": passage, "score": score}
            if result.parts is not None:
                parts = asdict(result.parts[index])
                item["parts"] = {kind: np.float32(part) for kind, part in parts.items()}
            yield item

    return render_object({"results": render_list(ranked())} | about | report(result))


def rank_by_score(scores: list[float]) -> list[tuple[int, np.float32]]:
    """The indices of the request and their scores, the best first.

    They are sorted as float32, of which orjson writes the shortest distinct digits, so that scores
    that look equal to a client keep the order of the request.
    """
    shown = np.array(scores, dtype=np.float32)
    return [(index, shown[index]) for index in np.argsort(-shown, kind="stable").tolist()]


def report(result: EmbeddingResult | RerankResult) -> dict[str, Any]:
    """The fields of every native response beside its results: times, warnings and usage."""
    timings = timings_as_json(result.timings)
    return {
        "processing_time_ms": timings["total"],
        "warnings": [
            *(truncation_as_json(cut, cut.field) for cut in result.truncations),
            *map(replacement_as_json, result.replaced),
        ],
        "usage": usage_as_json(result.tokens),
        "timings_ms": timings,
    }


def usage_as_json(tokens: int) -> dict[str, int]:
    """OpenAI's `usage` object, which many APIs have."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def timings_as_json(timings: Timings) -> dict[str, float]:
    """Milliseconds, to the microsecond."""
    stages = ("tokenize", "queue", "inference", "total")
    return {stage: round(getattr(timings, stage) * 1000, 3) for stage in stages}


def truncation_as_json(
    truncation: Truncation, field: str, pointer: str | None = None
) -> dict[str, Any]:
    """The warning that a text was truncated.

    `field` is the dialect's name for the list of texts; `pointer` is set for a text outside a list.
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
    """The warning that lone surrogates of a string of the request were read as U+FFFD."""
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
    """Hold, as `AnswerMemory.need`, what rendering takes of one text or of all `at_once`."""
    working = made = 0
    for each in embeddings:
        if request.colbert_pool_factor is not None and each.colbert is not None:
            working = max(working, pooling_bytes(len(each.colbert)))
        size = 0 if request.output_dtype == "float32" else each.nbytes // 2
        size += 0 if request.muvera is None else 4 * MUVERA_WIDTH
        made = made + size if at_once else max(made, size)
    advice = "send shorter texts, or leave out colbert_pool_factor"
    memory.need_more(working + made, "the vectors and what is made of them", advice)


@dataclass(frozen=True, slots=True)
class TextVectors:
    """The post-processed vectors of one text; None for a kind not asked for."""

    dense: QuantizedVectors | None
    sparse: SparseVector | None
    colbert: QuantizedVectors | None
    muvera: FloatArray | None
    tokens: TokenStrings | None

    @property
    def nbytes(self) -> int:
        """Their approximate size in bytes, without the strings."""
        vectors = [each.values.nbytes for each in (self.dense, self.colbert) if each is not None]
        sparse = 0 if self.sparse is None else self.sparse.indices.size * _WEIGHT_BYTES
        return sum(vectors) + sparse + (0 if self.muvera is None else self.muvera.nbytes)


@dataclass(frozen=True, slots=True)
class EmbeddingAnswer:
    """An answer before it is rendered; `model_fields` come from `describe_models`."""

    request: records.EmbedRequest
    result: EmbeddingResult
    model_fields: Mapping[str, Any]

    def vectors(self) -> Iterator[TextVectors]:
        """The vectors of each text, post-processed one by one while the answer is rendered."""
        strings = self.result.token_strings or repeat(None, len(self.request.texts))
        for embedding, tokens in zip(self.result.embeddings, strings, strict=True):
            yield vectors_of(embedding, self.request, tokens)

    def report(self) -> dict[str, Any]:
        """The fields beside vectors: models, usage, times, warnings and the type of the numbers."""
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
    """The chunks of the answer to an embedding request."""
    yield b'{"data":['
    texts = answer.request.texts
    for index, (text, row) in enumerate(zip(texts, answer.vectors(), strict=True)):
        if index:
            yield b","
        facts = {"id": index, "text": text_as_json(text)}
        yield from render_item(facts, row, sparse_as_indices=sparse_as_indices, as_base64=as_base64)
    told = answer.report()
    if answer.request.output_dtype == "float32" and not as_base64:
        del told["output_dtype"]
    yield b"]," + orjson.dumps(told)[1:]


def render_item(
    facts: Mapping[str, Any], row: TextVectors, *, sparse_as_indices: bool, as_base64: bool
) -> Iterator[bytes]:
    """The JSON object of one text: `facts`, its vectors and its tokens."""
    sparse = row.sparse
    yield orjson.dumps(facts)[:-1] + b',"embeddings":{'
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
        names: Any = row.tokens.sparse
        if names is not None and sparse is not None and not (sparse_as_indices or as_base64):
            names = dict(zip(sparse.indices.tolist(), names, strict=True))
        tokens = {"sparse": names, "colbert": row.tokens.colbert}
        yield b',"tokens":' + orjson.dumps(tokens, option=OPTIONS)
    yield b"}"


def render_vectors(
    name: str, vectors: QuantizedVectors | None, *, as_base64: bool = False
) -> Iterator[bytes]:
    """The field `name` of an object, and its scales where the type of the numbers has some."""
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
        # orjson takes no array without dimensions.
        scales = vectors.scales if vectors.scales.ndim else vectors.scales[()]
        yield b',"%s_scale":' % name.encode() + orjson.dumps(scales, option=OPTIONS)


def _as_base64(values: npt.NDArray[Any], type_name: str | None = None) -> Iterator[bytes]:
    """Piece by piece; three bytes make four letters, whatever stands beside them."""
    about = orjson.dumps({"dtype": type_name or values.dtype.name, "shape": values.shape})
    yield about[:-1] + b',"data":"'
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    for start in range(0, len(content), _BASE64_BYTES):
        yield b2a_base64(content[start : start + _BASE64_BYTES], newline=False)
    yield b'"}'


def describe_models(models: LoadedModels, spaces: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an answer that tell the model and the space of each kind of vectors."""
    dense, own = models.dense_model.name, models.embedder.name
    return {
        "model_name": dense,
        "dense_model_name": dense,
        "sparse_model_name": own,
        "colbert_model_name": own,
        "vector_space": {kind: spaces.get(kind) for kind in VECTORS},
    }

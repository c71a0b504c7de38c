"""Rendering results to JSON by orjson, in chunks, and responses of chunks.

A chunk takes a few milliseconds at most, during which orjson holds the GIL; the event loop runs
between chunks. The text of a vector is several times as large as its numbers, so a large answer is
rendered while the client reads it.
"""

import asyncio
from binascii import b2a_base64
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from smart_embedder.results import (
    EmbeddingResult,
    RerankResult,
    SparseVector,
    Timings,
    Truncation,
)

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
        self._rest = messages_of(chunks)
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


def messages_of(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
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
        for index, score in by_falling_score(result.scores):
            passage = text_as_json(passages[index])
            item: dict[str, Any] = {"index": index, "passage": passage, "score": score}
            if result.parts is not None:
                parts = asdict(result.parts[index])
                item["parts"] = {kind: np.float32(part) for kind, part in parts.items()}
            yield item

    return render_object({"results": render_list(ranked())} | about | report(result))


def by_falling_score(scores: list[float]) -> list[tuple[int, np.float32]]:
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

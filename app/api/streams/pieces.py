"""Embeds a stream piece by piece: consecutive lines, each with its result or its error."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from app.api.errors import error_facts
from app.api.formats.answer import VectorOptions, vectors_of
from app.api.formats.records import Record
from app.api.handler import Service
from app.api.rendering import truncation_as_json
from app.api.streams.lines import Line
from app.engine.types import EmbeddingResult, TextEmbedding, TokenStrings, Truncation
from app.errors import (
    InferenceTimeoutError,
    LoadingError,
    OutOfMemoryError,
    QueueFullError,
    SmartEmbedderError,
    UnavailableError,
)

# Approximately, with JSON around short texts.
_BYTES_PER_TOKEN = 4
# The limits of a piece of several forwards.
_PIECE_SECONDS = 0.1
_PIECE_VECTOR_BYTES = 4 << 20


EmbedTexts = Callable[[list[str]], Awaitable[EmbeddingResult]]


@dataclass(frozen=True, slots=True)
class LineResult:
    """The vectors of one line, or its error."""

    line: Line
    embedding: TextEmbedding | None = None
    tokens: TokenStrings | None = None
    truncations: tuple[Truncation, ...] = ()
    error: SmartEmbedderError | None = None

    def record(self, options: VectorOptions) -> Record:
        """The record of the line; takes the time of post-processing its vectors."""
        if self.error is not None or self.embedding is None:
            return Record(self.line.id, None, error=self._error())
        warnings = [
            truncation_as_json(replace(cut, index=self.line.number - 1), "text", "/text")
            for cut in self.truncations
        ]
        return Record(self.line.id, vectors_of(self.embedding, options, self.tokens), warnings)

    def _error(self) -> dict[str, Any]:
        error = self.error or SmartEmbedderError("there is no result")
        return error_facts(error) | {"line": self.line.number}


@dataclass(frozen=True, slots=True)
class Piece:
    """The results of consecutive lines.

    `tokens` is how many were read, `nbytes` the size of the vectors, `seconds` the forwards' time.
    """

    results: list[LineResult]
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def joined(self, after: "Piece") -> "Piece":
        """This one and the one that follows it."""
        return Piece(
            self.results + after.results,
            self.tokens + after.tokens,
            self.nbytes + after.nbytes,
            self.seconds + after.seconds,
        )


class PieceSize:
    """How many bytes of the body form a piece: about as many as have the tokens of a forward.

    A piece costs some milliseconds beside its forwards, so where a forward is quick a piece has the
    tokens of several, as long as their vectors are small.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self.bytes = _BYTES_PER_TOKEN * max_batch_tokens

    def observe(self, piece: Piece) -> None:
        """Adapt the size to the tokens and times of a piece, by a factor of two at most."""
        if not (piece.seconds and piece.nbytes):
            return
        size = sum(result.line.size for result in piece.results)
        several = min(_PIECE_SECONDS / piece.seconds, _PIECE_VECTOR_BYTES / piece.nbytes)
        wanted = size * max(self._max_batch_tokens / piece.tokens, several)
        self.bytes = int(min(max(wanted, self.bytes / 2), self.bytes * 2))


class PieceEmbedder:
    """Embeds pieces of one stream by `embed`, each with a slot for streams.

    It waits while the queue is full, or the model is being loaded. After an error it tries halves,
    down to single texts, so that an error that one text has caused is that text's alone.
    """

    def __init__(self, service: Service, client: str, embed: EmbedTexts) -> None:
        self._metrics = service.metrics
        self._slots = service.stream_slots
        self._client = client
        self._embed_texts = embed

    async def embed(self, lines: Sequence[Line]) -> Piece:
        """The results of these lines; raises `UnavailableError` if the service cannot go on."""
        good = [line for line in lines if line.error is None]
        piece = await self._results(good)
        if len(good) == len(lines):
            return piece
        computed = {result.line.number: result for result in piece.results}
        results = [
            computed.get(line.number) or LineResult(line, error=line.error) for line in lines
        ]
        return replace(piece, results=results)

    async def _results(self, lines: Sequence[Line]) -> Piece:
        if not lines:
            return Piece([])
        try:
            result = await self._embed_when_possible([line.text for line in lines])
        except OutOfMemoryError as error:
            return await self._halves(lines, error)
        except UnavailableError:
            raise
        except InferenceTimeoutError as error:  # Halves would wait for the same device.
            return Piece([LineResult(line, error=error) for line in lines])
        except SmartEmbedderError as error:
            return await self._halves(lines, error)
        self._metrics.sentences.inc(len(lines))
        return _of_lines(lines, result)

    async def _halves(self, lines: Sequence[Line], error: SmartEmbedderError) -> Piece:
        if len(lines) == 1:
            return Piece([LineResult(lines[0], error=error)])
        middle = len(lines) // 2
        first = await self._results(lines[:middle])
        return first.joined(await self._results(lines[middle:]))

    async def _embed_when_possible(self, texts: list[str]) -> EmbeddingResult:
        while True:
            try:
                return await self._embed(texts)
            # A model that gave way to another, while the stream lasts, is loaded again.
            except (QueueFullError, LoadingError) as error:
                pause = error.retry_after or 1
            await asyncio.sleep(pause)

    async def _embed(self, texts: list[str]) -> EmbeddingResult:
        await self._slots.acquire(self._client)
        try:
            return await self._embed_texts(texts)
        finally:
            self._slots.release(self._client)


def _of_lines(lines: Sequence[Line], result: EmbeddingResult) -> Piece:
    cuts: dict[int, list[Truncation]] = {}
    for cut in result.truncations:
        cuts.setdefault(cut.index, []).append(cut)
    strings = result.token_strings or repeat(None, len(lines))
    results = [
        LineResult(line, vectors, tokens, tuple(cuts.get(i, ())))
        for i, (line, vectors, tokens) in enumerate(
            zip(lines, result.embeddings, strings, strict=True)
        )
    ]
    nbytes = sum(each.nbytes for each in result.embeddings)
    return Piece(results, result.tokens, nbytes, result.timings.inference)

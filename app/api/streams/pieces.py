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
from app.engine.answer_memory import AnswerMemory
from app.engine.types import EmbeddingResult, TextEmbedding, TokenStrings, Truncation
from app.errors import (
    InferenceTimeoutError,
    InvalidRequestError,
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


# One is computed, one waits for the device (a GPU has launched it), one is tokenised, one sent.
PIECES = 4

EmbedTexts = Callable[[list[str], AnswerMemory], Awaitable[EmbeddingResult]]


class _NoRoomYetError(QueueFullError):
    """The pieces before this one hold too much; it goes on when one of them is sent."""


class PieceMemory:
    """What the pieces of one stream hold together: `max_bytes`, or more if it is the oldest's.

    They are sent in order, so the oldest never waits for the others.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: dict[PieceAnswer, int] = {}
        self._freed = asyncio.Event()

    def begin(self) -> "PieceAnswer":
        """Begin a piece, younger than all others."""
        answer = PieceAnswer(self)
        self._held[answer] = 0
        return answer

    def hold(self, answer: "PieceAnswer", size: int) -> None:
        """Let a piece hold `size` bytes in all, if those before it leave room."""
        others = sum(held for each, held in self._held.items() if each is not answer)
        if others + size > self.max_bytes and answer is not next(iter(self._held)):
            raise _NoRoomYetError("the pieces of this stream that come before hold its memory")
        self._held[answer] = size

    def end(self, answer: "PieceAnswer") -> None:
        """The piece is sent."""
        del self._held[answer]
        self._freed.set()
        self._freed = asyncio.Event()

    def next_end(self) -> asyncio.Event:
        """What is set when the next piece is sent."""
        return self._freed


class PieceAnswer(AnswerMemory):
    """What one piece holds: that of the texts that are computed together, and of those before."""

    def __init__(self, memory: PieceMemory) -> None:
        super().__init__(memory.max_bytes)
        self._memory = memory
        self._computed = 0

    def need(self, size: int, what: str, advice: str) -> None:
        """Implement `AnswerMemory`."""
        super().need(size, what, advice)
        self._memory.hold(self, self._computed + size)

    def keep(self, size: int) -> None:
        """Record that some of its texts are computed and hold `size` bytes."""
        self._computed += size

    def next_end(self) -> asyncio.Event:
        """What is set when there is more room."""
        return self._memory.next_end()

    def end(self) -> None:
        """Hold nothing any more: the piece is sent."""
        self._memory.end(self)


@dataclass(frozen=True, slots=True)
class LineResult:
    """The vectors of one line, or its error."""

    line: Line
    embedding: TextEmbedding | None = None
    tokens: TokenStrings | None = None
    truncations: tuple[Truncation, ...] = ()
    error: SmartEmbedderError | None = None

    def record(self, options: VectorOptions, max_bytes: int) -> Record:
        """The record of the line; takes the time of post-processing its vectors.

        Post-processing that takes more than `max_bytes` is an error.
        """
        if self.error is not None or self.embedding is None:
            return Record(self.line.id, None, error=self._error())
        try:
            options.hold([self.embedding], AnswerMemory(max_bytes))
        except InvalidRequestError as error:
            return replace(self, error=error).record(options, max_bytes)
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
    It holds `answer` until it is sent.
    """

    results: list[LineResult]
    answer: PieceAnswer
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def joined(self, after: "Piece") -> "Piece":
        """This one and the one that follows it."""
        return Piece(
            self.results + after.results,
            self.answer,
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

    async def embed(self, lines: Sequence[Line], answer: PieceAnswer) -> Piece:
        """The results of these lines, whose room is taken from `answer`.

        Raises `UnavailableError` if the service cannot go on.
        """
        good = [line for line in lines if line.error is None]
        piece = await self._results(good, answer)
        if len(good) == len(lines):
            return piece
        computed = {result.line.number: result for result in piece.results}
        results = [
            computed.get(line.number) or LineResult(line, error=line.error) for line in lines
        ]
        return replace(piece, results=results)

    async def _results(self, lines: Sequence[Line], answer: PieceAnswer) -> Piece:
        if not lines:
            return Piece([], answer)
        try:
            result = await self._embed_when_possible([line.text for line in lines], answer)
        except OutOfMemoryError as error:
            return await self._halves(lines, error, answer)
        except UnavailableError:
            raise
        except InferenceTimeoutError as error:  # Halves would wait for the same device.
            return Piece([LineResult(line, error=error) for line in lines], answer)
        except SmartEmbedderError as error:
            return await self._halves(lines, error, answer)
        self._metrics.sentences.inc(len(lines))
        piece = _of_lines(lines, result, answer)
        answer.keep(piece.nbytes)
        return piece

    async def _halves(
        self, lines: Sequence[Line], error: SmartEmbedderError, answer: PieceAnswer
    ) -> Piece:
        if len(lines) == 1:
            return Piece([LineResult(lines[0], error=error)], answer)
        middle = len(lines) // 2
        first = await self._results(lines[:middle], answer)
        return first.joined(await self._results(lines[middle:], answer))

    async def _embed_when_possible(self, texts: list[str], answer: PieceAnswer) -> EmbeddingResult:
        while True:
            more_room = answer.next_end()
            try:
                return await self._embed(texts, answer)
            except _NoRoomYetError:
                await more_room.wait()
                continue
            # A model that gave way to another, while the stream lasts, is loaded again.
            except (QueueFullError, LoadingError) as error:
                pause = error.retry_after or 1
            await asyncio.sleep(pause)

    async def _embed(self, texts: list[str], answer: PieceAnswer) -> EmbeddingResult:
        await self._slots.acquire(self._client)
        try:
            return await self._embed_texts(texts, answer)
        finally:
            self._slots.release(self._client)


def _of_lines(lines: Sequence[Line], result: EmbeddingResult, answer: PieceAnswer) -> Piece:
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
    return Piece(results, answer, result.tokens, nbytes, result.timings.inference)

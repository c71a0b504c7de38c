"""The answer to a stream: pieces are computed concurrently and sent in order.

One task reads the body ahead, one divides its lines into pieces, and one sends the results. Only as
many pieces are in work as keep the device busy. So if the client does not read, nothing is sent,
then nothing more is computed, and then nothing more is read.
"""

import asyncio
import time
from asyncio import TaskGroup
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from smart_embedder import errors
from smart_embedder.api.context import StreamMemory
from smart_embedder.api.errors import error_facts, status_of
from smart_embedder.api.formats.records import Record, RecordWriter
from smart_embedder.api.formats.vectors import hold_rendering, vectors_of
from smart_embedder.api.handler import Call, Service
from smart_embedder.api.rendering import Chunk, FlushedCompressor, messages_of, truncation_as_json
from smart_embedder.api.stream.arrow_lines import ArrowReader
from smart_embedder.api.stream.lines import Line, NdjsonReader
from smart_embedder.engine.records import (
    AnswerMemory,
    EmbeddingResult,
    EmbedRequest,
    TextEmbedding,
    TokenStrings,
    Truncation,
)
from smart_embedder.engine.space import VectorSpace, require_spaces

# Approximately, with JSON around short texts.
_BYTES_PER_TOKEN = 4
# The limits of a piece of several forwards.
_PIECE_SECONDS = 0.1
_PIECE_VECTOR_BYTES = 4 << 20
# One is computed, one waits for the device (a GPU has launched it), one is tokenised, one sent.
PIECES = 4
# Of vectors, rendered and sent at a time.
_UNIT_BYTES = 1 << 20
_RETRY_AFTER = 5
READ_AHEAD_BYTES = 1 << 20
# After that a client may be one that reads only when it has sent its whole body.
_STALLED_SECONDS = 1.0
_LOOK_SECONDS = 0.25

LineReader = NdjsonReader | ArrowReader


class _NoRoomYetError(errors.QueueFullError):
    """The pieces before this one hold too much; it goes on when one of them is sent."""


@dataclass(eq=False)
class PieceMemory:
    """What the pieces of one stream hold together: `max_bytes`, or more if it is the oldest's.

    They are sent in order, so the oldest, the first of `held`, never waits for the others. `freed`
    is set when the next piece is sent.
    """

    max_bytes: int
    held: "dict[Piece, int]" = field(default_factory=dict)
    freed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class LineResult:
    """The vectors of one line, or its error."""

    line: Line
    outcome: TextEmbedding | errors.SmartEmbedderError
    tokens: TokenStrings | None = None
    truncations: tuple[Truncation, ...] = ()

    def record(self, request: EmbedRequest, max_bytes: int) -> Record:
        """The record of the line; takes the time of post-processing its vectors.

        Post-processing that takes more than `max_bytes` is an error.
        """
        line, outcome = self.line, self.outcome
        if isinstance(outcome, TextEmbedding):
            try:
                hold_rendering([outcome], request, AnswerMemory(max_bytes))
            except errors.InvalidRequestError as refused:
                outcome = refused
        if isinstance(outcome, errors.SmartEmbedderError):
            return Record(line.id, None, error=error_facts(outcome) | {"line": line.number})
        warnings = [
            truncation_as_json(replace(cut, index=line.number - 1), "text", "/text")
            for cut in self.truncations
        ]
        return Record(line.id, vectors_of(outcome, request, self.tokens), warnings)


class Piece(AnswerMemory):
    """The results of consecutive lines, and what they hold until they are sent.

    `tokens` is how many were read, `nbytes` the size of the vectors, `seconds` the forwards' time.
    It is younger than all other pieces in `memory`.
    """

    def __init__(self, memory: PieceMemory) -> None:
        super().__init__(memory.max_bytes)
        self.memory = memory
        self.results: list[LineResult] = []
        self.tokens = self.nbytes = 0
        self.seconds = 0.0
        memory.held[self] = 0

    def need(self, size: int, what: str, advice: str) -> None:
        """Implement `AnswerMemory` for the texts that are computed together, beside those before.

        Raises `_NoRoomYetError` where the pieces before this one leave no room.
        """
        super().need(size, what, advice)
        held, wanted = self.memory.held, self.nbytes + size
        others = sum(held.values()) - held[self]
        if others + wanted > self.allowed and self is not next(iter(held)):
            raise _NoRoomYetError("the pieces of this stream that come before hold its memory")
        held[self] = wanted

    def add(self, lines: Sequence[Line], result: EmbeddingResult) -> None:
        """Add the results of the next lines, which were computed together."""
        cuts: dict[int, list[Truncation]] = {}
        for cut in result.truncations:
            cuts.setdefault(cut.index, []).append(cut)
        strings = result.token_strings or repeat(None, len(lines))
        rows = zip(lines, result.embeddings, strings, strict=True)
        for i, (line, vectors, tokens) in enumerate(rows):
            self.results.append(LineResult(line, vectors, tokens, tuple(cuts.get(i, ()))))
        self.nbytes += sum(each.nbytes for each in result.embeddings)
        self.tokens += result.tokens
        self.seconds += result.timings.inference

    def end(self) -> None:
        """Hold nothing any more: the piece is sent."""
        del self.memory.held[self]
        self.memory.freed.set()
        self.memory.freed = asyncio.Event()


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


@dataclass(frozen=True, slots=True)
class PieceEmbedder:
    """Embeds pieces of one stream, each with a slot for streams.

    It waits while the queue is full, or the model is being loaded. After an error it tries halves,
    down to single texts, so that an error that one text has caused is that text's alone. All are
    of the `spaces` that the answer began with: lines after a model was replaced are refused.
    """

    service: Service
    request: EmbedRequest
    spaces: Mapping[str, VectorSpace]

    async def embed(self, lines: Sequence[Line], piece: Piece) -> None:
        """Put the results of these lines into `piece`.

        Raises `UnavailableError` if the service cannot go on.
        """
        if good := [line for line in lines if line.error is None]:
            await self._add_results(piece, good)
        piece.results += [LineResult(line, line.error) for line in lines if line.error is not None]
        piece.results.sort(key=lambda result: result.line.number)

    async def _add_results(self, piece: Piece, lines: Sequence[Line]) -> None:
        try:
            result = await self._embed_when_possible([line.text for line in lines], piece)
        except errors.SmartEmbedderError as error:
            is_for_all = isinstance(error, errors.UnavailableError)
            if is_for_all and not isinstance(error, errors.OutOfMemoryError):
                raise
            # Halves would wait for the device that a timeout was of.
            if len(lines) == 1 or isinstance(error, errors.InferenceTimeoutError):
                piece.results += [LineResult(line, error) for line in lines]
                return
            middle = len(lines) // 2
            await self._add_results(piece, lines[:middle])
            await self._add_results(piece, lines[middle:])
        else:
            self.service.metrics.sentences.inc(len(lines))
            piece.add(lines, result)

    async def _embed_when_possible(self, texts: list[str], piece: Piece) -> EmbeddingResult:
        engine, slots = self.service.engine, self.service.stream_slots
        request = replace(self.request, texts=texts, answer=piece)
        while True:
            more_room = piece.memory.freed
            try:
                await slots.acquire(request.client)
                try:
                    async with engine.lease(request.model) as models:
                        spaces = models.spaces_of(request)
                        require_spaces(self.spaces.values(), spaces, "the first lines'")
                        return await engine.embedding.embed(models, request)
                finally:
                    slots.release(request.client)
            except _NoRoomYetError:
                await more_room.wait()
            # A model that gave way to another, while the stream lasts, is loaded again.
            except (errors.QueueFullError, errors.LoadingError) as error:
                await asyncio.sleep(error.retry_after or 1)


@dataclass(eq=False)
class StreamBody:
    """Reads the lines of a stream in a task of its own, `read`, while others take them.

    At most READ_AHEAD_BYTES are read ahead. `stalled_seconds` is how long the client has read
    nothing of the answer. After a second it may be one that sends its whole body first, and up to
    `max_ahead` bytes are read. If the body is longer, and the client still reads nothing after
    `patience` seconds, `given_up` is set to the error, and the rest of the body is dropped, so that
    a client that reads only after sending gets the error. `run` runs the steps of parsing lines.
    """

    receive: Receive
    lines: LineReader
    memory: StreamMemory
    stalled_seconds: Callable[[], float]
    is_closing: Callable[[], bool] | None
    run: Callable[[Generator[None, None, list[Line]]], Awaitable[list[Line]]]
    max_ahead: int
    patience: float
    given_up: errors.SmartEmbedderError | None = None
    _held: int = 0
    _complete: bool = False
    _error: errors.SmartEmbedderError | None = None
    _stopped_by: errors.SmartEmbedderError | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _taken: asyncio.Event = field(default_factory=asyncio.Event)

    async def begin(self) -> None:
        """Read the first part, and what is needed to know how the lines are read."""
        await self._read_part()
        while not (self.lines.begun or self._complete):
            await self._read_part()

    async def read(self) -> None:
        """Read to the end, then until the client leaves: raises `ClientGoneError`."""
        while not self._complete and self._error is None:
            try:
                await self._wait_for_room()
                await self._read_part()
            except errors.ClientGoneError:
                raise
            except errors.SmartEmbedderError as error:
                self._error = error
            self._arrived.set()
        # The rest is dropped, so that a client that is still sending can read the error.
        while True:
            body = (await self._receive_part()).get("body", b"")
            self.memory.release_body(len(body))

    def stop(self, error: errors.SmartEmbedderError) -> None:
        """End the body: `take` raises `error` from now on."""
        self._stopped_by = self._stopped_by or error
        self._arrived.set()

    async def take(self, max_lines: int, max_bytes: int) -> list[Line]:
        """The next lines that have arrived; empty at the end of the body.

        Raises an error of the body once the lines before it are taken.
        """
        while self._stopped_by is None:
            self._arrived.clear()
            lines = await self.run(self.lines.take(max_lines, max_bytes))
            self._release_unused()
            if lines:
                self._taken.set()
                return lines
            if self._arrived.is_set():  # Meanwhile, behind what was looked at.
                continue
            if self._error is not None:
                raise self._error
            if self._complete:
                return []
            await self._arrived.wait()
        raise self._stopped_by

    async def _read_part(self) -> None:
        message = await self._receive_part()
        body = message.get("body", b"")
        self._held += len(body)
        self.lines.feed(body)
        self._release_unused()
        if not message.get("more_body", False):
            self._complete = True
            self.lines.end()

    async def _receive_part(self) -> Message:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise errors.ClientGoneError("the client left before its stream was complete")
        return message

    def _release_unused(self) -> None:
        unused = self._held - self.lines.buffered
        if unused > 0:
            self.memory.release_body(unused)
            self._held -= unused

    async def _wait_for_room(self) -> None:
        """Wait while enough is read ahead.

        Raises an error if the client has left, which `receive` would tell, or does not read.
        """
        max_ahead = max(self.max_ahead, READ_AHEAD_BYTES)
        while self.lines.ready:
            is_stalled = self.stalled_seconds() >= _STALLED_SECONDS
            if self.lines.buffered < (max_ahead if is_stalled else READ_AHEAD_BYTES):
                return
            self._taken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._taken.wait()
                continue
            if self.is_closing is not None and self.is_closing():
                raise errors.ClientGoneError("the client left before its stream was answered")
            if self.stalled_seconds() >= self.patience:
                self.given_up = errors.AnswerNotTakenError(
                    f"the results were not read for {self.patience:g} seconds (REQUEST_TIMEOUT) "
                    f"while more than {max_ahead} bytes of lines (MAX_BODY_BYTES) waited: read "
                    "while you send, or send fewer lines in one stream"
                )
                self.stop(self.given_up)
                raise self.given_up


_Result = asyncio.Task[Piece | errors.SmartEmbedderError] | errors.SmartEmbedderError


class StreamResponse(Response):
    """Embeds the lines of the request's body while it arrives.

    A piece holds at most `max_lines`, and about as many bytes of the body as `size` says.
    `make_writer` is called when `lines` has read the beginning of the body.
    """

    def __init__(
        self,
        call: Call,
        lines: LineReader,
        embedder: PieceEmbedder,
        request: EmbedRequest,
        make_writer: Callable[[], RecordWriter],
        *,
        max_lines: int,
        size: PieceSize,
        media_type: str,
        encoding: str | None,
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        # Tells nginx not to buffer the answer.
        self.headers["X-Accel-Buffering"] = "no"
        if encoding is not None:
            self.headers.update({"Content-Encoding": encoding, "Vary": "Accept-Encoding"})
        self._compressor = None if encoding is None else FlushedCompressor(encoding)
        self._call, self._lines, self._embedder, self._request = call, lines, embedder, request
        self._make_writer, self._max_lines, self._size = make_writer, max_lines, size
        self._slots = asyncio.Semaphore(PIECES)
        self._memory = PieceMemory(call.context.answer.allowed)
        # Pieces, or the error that ends the stream, in order; None is the end.
        self._results: asyncio.Queue[_Result | None] = asyncio.Queue()
        self._computing: set[asyncio.Task[Piece | errors.SmartEmbedderError]] = set()
        self._sending_since: float | None = None
        # For the log, as far as the stream has come.
        self._counts: dict[str, int | float] = {"sentences": 0, "failed": 0, "tokens": 0}
        # The rate limit has counted one request, which pays for as many lines as one may have.
        self._paid_lines = call.service.settings.max_sentences_per_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until every line is answered, the stream has to end, or the client leaves."""
        settings, context = self._call.service.settings, self._call.context
        body = StreamBody(
            receive,
            self._lines,
            context.memory,
            self._stalled_seconds,
            scope["state"].get("is_closing"),
            run=partial(self._call.service.turns.run, context.client),
            max_ahead=settings.max_body_bytes,
            patience=settings.request_timeout,
        )
        await body.begin()
        context.counts = self._counts
        try:
            async with TaskGroup() as group:
                work = (body.read(), self._make_pieces(body, group), self._stop_at_drain(body))
                helpers = [group.create_task(each) for each in work]
                await self._answer(body, send)
                # Pieces that are not sent any more may wait for the memory of one that never is.
                for each in (*helpers, *self._computing):
                    each.cancel()
        except* errors.ClientGoneError as gone:
            context.error_code = errors.ClientGoneError.code
            del gone

    def _stalled_seconds(self) -> float:
        """Seconds since the client last read some of the answer, while something is being sent."""
        return 0.0 if self._sending_since is None else time.monotonic() - self._sending_since

    async def _stop_at_drain(self, body: StreamBody) -> None:
        await self._call.service.drain.wait_for_beginning()
        message = "the service is shutting down: send the texts that have no record again"
        body.stop(errors.DrainingError(message, retry_after=_RETRY_AFTER))

    async def _make_pieces(self, body: StreamBody, group: TaskGroup) -> None:
        """Compute a piece whenever a slot is free; an error of the body is sent in its place."""
        service, client = self._call.service, self._call.context.client
        while True:
            await self._slots.acquire()
            try:
                lines = await body.take(self._max_lines, self._size.bytes)
            except errors.SmartEmbedderError as error:
                self._results.put_nowait(error)
                return
            if not lines:
                self._results.put_nowait(None)
                return
            # For the rate limit they are as many requests of full size.
            self._paid_lines -= len(lines)
            while self._paid_lines < 0:
                if wait := await service.buckets.take(client):
                    await asyncio.sleep(wait)
                else:
                    self._paid_lines += service.settings.max_sentences_per_request
            computed = group.create_task(self._compute(lines, Piece(self._memory)))
            self._computing.add(computed)
            computed.add_done_callback(self._computing.discard)
            self._results.put_nowait(computed)

    async def _compute(self, lines: list[Line], piece: Piece) -> Piece | errors.SmartEmbedderError:
        try:
            await self._embedder.embed(lines, piece)
        except errors.SmartEmbedderError as error:
            return error
        self._size.observe(piece)
        self._call.context.memory.hold_vectors(piece.nbytes)
        return piece

    async def _answer(self, body: StreamBody, send: Send) -> None:
        context, writer = self._call.context, self._make_writer()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = b""
        while (result := await self._results.get()) is not None:
            outcome = body.given_up or result
            piece = await outcome if isinstance(outcome, asyncio.Task) else outcome
            if isinstance(piece, errors.SmartEmbedderError):
                # The record of an error that ends the stream before its body.
                context.error_code, context.error_status = piece.code, status_of(piece)
                record = Record(None, None, error=error_facts(piece))
                last = b"".join(self._compressed(writer.write([record])))
                break
            await self._send_piece(piece, writer, body, send)
        last += b"".join(self._compressed([writer.end()], last=True))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_piece(
        self, piece: Piece, writer: RecordWriter, body: StreamBody, send: Send
    ) -> None:
        loop, threads = asyncio.get_running_loop(), self._call.service.render_threads
        render = partial(next, self._messages(writer, iter(piece.results), body), None)
        while (message := await loop.run_in_executor(threads, render)) is not None:
            self._sending_since = time.monotonic()
            await send({"type": "http.response.body", "body": message, "more_body": True})
            self._sending_since = None
        piece.end()
        self._call.context.memory.release_vectors(piece.nbytes)
        failed = sum(not isinstance(each.outcome, TextEmbedding) for each in piece.results)
        self._counts["sentences"] += len(piece.results) - failed
        self._counts["failed"] += failed
        self._counts["tokens"] += piece.tokens
        self._slots.release()

    def _messages(
        self, writer: RecordWriter, results: Iterator[LineResult], body: StreamBody
    ) -> Iterator[Chunk]:
        """The messages of all records, or of whole ones until `body` is given up."""
        while body.given_up is None:
            records: list[Record] = []
            size = 0
            for result in results:
                records.append(result.record(self._request, self._memory.max_bytes))
                vectors = records[-1].vectors
                size += 0 if vectors is None else vectors.nbytes
                if size >= _UNIT_BYTES:
                    break
            if not records:
                return
            yield from filter(None, messages_of(self._compressed(writer.write(records))))

    def _compressed(self, chunks: Iterable[Chunk], *, last: bool = False) -> Iterable[Chunk]:
        if self._compressor is None:
            return chunks
        return self._compressor.compress(chunks, last=last)

"""The answer to a stream: pieces are computed concurrently and sent in order.

One task reads the body ahead, one divides its lines into pieces, and one sends the results. Only as
many pieces are in work as keep the device busy. So if the client does not read, nothing is sent,
then nothing more is computed, and then nothing more is read.
"""

import asyncio
import time
from asyncio import TaskGroup
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.compression import FlushedCompressor
from app.api.errors import error_facts, status_of
from app.api.formats.answer import VectorOptions
from app.api.formats.records import Record, RecordWriter
from app.api.handler import Call
from app.api.rendering import Chunk, messages_of
from app.api.streams.body import StreamBody
from app.api.streams.lines import Line, LineReader
from app.api.streams.pieces import (
    PIECES,
    LineResult,
    Piece,
    PieceAnswer,
    PieceEmbedder,
    PieceMemory,
    PieceSize,
)
from app.errors import ClientGoneError, DrainingError, SmartEmbedderError

# Of vectors, rendered and sent at a time.
_UNIT_BYTES = 1 << 20
_RETRY_AFTER = 5

Result = asyncio.Future[Piece | SmartEmbedderError]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How one stream is read, computed and written.

    A piece holds at most `max_lines`, and about as many bytes of the body as `size` says.
    `make_writer` is called when `lines` has read the beginning of the body.
    """

    lines: LineReader
    embedder: PieceEmbedder
    vectors: VectorOptions
    make_writer: Callable[[], RecordWriter]
    max_lines: int
    size: PieceSize
    media_type: str
    encoding: str | None


class StreamResponse(Response):
    """Embeds the lines of the request's body while it arrives."""

    def __init__(self, call: Call, plan: StreamPlan) -> None:
        super().__init__(media_type=plan.media_type)
        del self.headers["content-length"]
        # Tells nginx not to buffer the answer.
        self.headers["X-Accel-Buffering"] = "no"
        if plan.encoding is not None:
            self.headers.update({"Content-Encoding": plan.encoding, "Vary": "Accept-Encoding"})
        self._compressor = None if plan.encoding is None else FlushedCompressor(plan.encoding)
        self._call, self._plan = call, plan
        self._slots = asyncio.Semaphore(PIECES)
        self._memory = PieceMemory(call.context.answer.allowed)
        self._results: asyncio.Queue[Result | None] = asyncio.Queue()
        self._sending_since: float | None = None
        self._counts = {"sentences": 0, "failed": 0, "tokens": 0}
        # The rate limit has counted one request, which pays for as many lines as one may have.
        self._paid_lines = call.service.settings.max_sentences_per_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until every line is answered, the stream has to end, or the client leaves."""
        settings, context = self._call.service.settings, self._call.context
        body = StreamBody(
            receive,
            self._plan.lines,
            context.memory,
            self._stalled_seconds,
            scope["state"].get("is_closing"),
            run=partial(self._call.service.turns.run, context.client),
            max_ahead=settings.max_body_bytes,
            patience=settings.request_timeout,
        )
        await body.begin()
        try:
            async with TaskGroup() as group:
                work = (body.read(), self._make_pieces(body, group), self._stop_at_drain(body))
                helpers = [group.create_task(each) for each in work]
                await self._answer(body, send)
                for each in helpers:
                    each.cancel()
        except* ClientGoneError as gone:
            context.error_code = ClientGoneError.code
            del gone
        finally:
            context.counts = dict(self._counts)

    def _stalled_seconds(self) -> float:
        """Seconds since the client last read some of the answer, while something is being sent."""
        return 0.0 if self._sending_since is None else time.monotonic() - self._sending_since

    async def _stop_at_drain(self, body: StreamBody) -> None:
        await self._call.service.drain.wait_for_beginning()
        message = "the service is shutting down: send the texts that have no record again"
        body.stop(DrainingError(message, retry_after=_RETRY_AFTER))

    async def _make_pieces(self, body: StreamBody, group: TaskGroup) -> None:
        """Compute a piece whenever a slot is free; an error of the body is sent in its place."""
        while True:
            await self._slots.acquire()
            try:
                lines = await body.take(self._plan.max_lines, self._plan.size.bytes)
            except SmartEmbedderError as error:
                ended: Result = asyncio.get_running_loop().create_future()
                ended.set_result(error)
                self._results.put_nowait(ended)
                return
            if not lines:
                self._results.put_nowait(None)
                return
            await self._pay(len(lines))
            self._results.put_nowait(group.create_task(self._compute(lines, self._memory.begin())))

    async def _pay(self, lines: int) -> None:
        """Count the lines for the rate limit as requests of full size; wait if it is used up."""
        service = self._call.service
        self._paid_lines -= lines
        while self._paid_lines < 0:
            wait = await service.buckets.take(self._call.context.client)
            if wait:
                await asyncio.sleep(wait)
            else:
                self._paid_lines += service.settings.max_sentences_per_request

    async def _compute(self, lines: list[Line], answer: PieceAnswer) -> Piece | SmartEmbedderError:
        try:
            piece = await self._plan.embedder.embed(lines, answer)
        except SmartEmbedderError as error:
            return error
        self._plan.size.observe(piece)
        memory = self._call.context.memory
        if memory is not None:
            memory.hold_vectors(piece.nbytes)
        return piece

    async def _answer(self, body: StreamBody, send: Send) -> None:
        writer = self._plan.make_writer()
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        last = b""
        while (result := await self._results.get()) is not None:
            piece = body.given_up or await result
            if isinstance(piece, SmartEmbedderError):
                last = self._last_record(writer, piece)
                break
            await self._send_piece(piece, writer, body, send)
        last += b"".join(self._compressed([writer.end()], last=True))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_piece(
        self, piece: Piece, writer: RecordWriter, body: StreamBody, send: Send
    ) -> None:
        service, memory = self._call.service, self._call.context.memory
        loop, results = asyncio.get_running_loop(), iter(piece.results)
        render = partial(next, self._messages(writer, results, body), None)
        while (message := await loop.run_in_executor(service.render_threads, render)) is not None:
            self._sending_since = time.monotonic()
            await send({"type": "http.response.body", "body": message, "more_body": True})
            self._sending_since = None
        piece.answer.end()
        if memory is not None:
            memory.release_vectors(piece.nbytes)
        self._count(piece)
        self._slots.release()

    def _messages(
        self, writer: RecordWriter, results: Iterator[LineResult], body: StreamBody
    ) -> Iterator[Chunk]:
        """The messages of all records, or of whole ones until `body` is given up."""
        while body.given_up is None and (records := self._next_records(results)):
            for message in messages_of(self._compressed(writer.write(records))):
                if message:
                    yield message

    def _next_records(self, results: Iterator[LineResult]) -> list[Record]:
        """The next records that are rendered together; none after the last one."""
        records: list[Record] = []
        size = 0
        for result in results:
            records.append(result.record(self._plan.vectors, self._memory.max_bytes))
            vectors = records[-1].vectors
            size += 0 if vectors is None else vectors.nbytes
            if size >= _UNIT_BYTES:
                break
        return records

    def _last_record(self, writer: RecordWriter, error: SmartEmbedderError) -> bytes:
        """The record of an error that ends the stream before its body."""
        context = self._call.context
        context.error_code, context.error_status = error.code, status_of(error)
        record = Record(None, None, error=error_facts(error))
        return b"".join(self._compressed(writer.write([record])))

    def _compressed(self, chunks: Iterable[Chunk], *, last: bool = False) -> Iterable[Chunk]:
        if self._compressor is None:
            return chunks
        return self._compressor.compress(chunks, last=last)

    def _count(self, piece: Piece) -> None:
        failed = sum(result.error is not None for result in piece.results)
        self._counts["sentences"] += len(piece.results) - failed
        self._counts["failed"] += failed
        self._counts["tokens"] += piece.tokens

"""The answer to a stream: in order, no further than its client reads, and with one clear end."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backports import zstd
from starlette.requests import Request

from smart_embedder.api.context import EMBEDDING_STREAM, RequestContext
from smart_embedder.api.formats.records import NDJSON, WRITERS, Record, RecordOptions
from smart_embedder.api.formats.vectors import hold_rendering
from smart_embedder.api.handler import Call, Service
from smart_embedder.api.stream import answer as module
from smart_embedder.api.stream.answer import (
    PIECES,
    LineResult,
    Piece,
    PieceEmbedder,
    PieceMemory,
    PieceSize,
    StreamResponse,
)
from smart_embedder.api.stream.lines import Line, NdjsonReader
from smart_embedder.engine.records import (
    AnswerMemory,
    EmbeddingResult,
    EmbedRequest,
    Outputs,
    TextEmbedding,
    Timings,
    TokenStrings,
    Truncation,
)
from smart_embedder.engine.space import VectorSpace
from smart_embedder.errors import (
    InferenceError,
    InferenceTimeoutError,
    InvalidRequestError,
    LoadingError,
    OutOfMemoryError,
    QueueFullError,
    UnavailableError,
)
from smart_embedder.main import create_app
from smart_embedder.settings import Settings
from tests.support.skipped_time import turns

PATIENCE = 60.0
LINES = b"".join(b'"%d"\n' % number for number in range(12))


NEEDED = ("the vectors", "send fewer texts")


def space_of(weights: str) -> dict[str, VectorSpace]:
    return {"dense": VectorSpace("dense", weights, *7 * ["same"])}


class Texts:
    """An engine that embeds each text as its length, or raises what is planned for a text.

    It does so once `go` is set, or what is `ready` for the first text. `calls` are what it has been
    asked for, and `slots` how many of its streams' slots the client held.
    """

    def __init__(self, **settings: Any) -> None:
        values = {"api_token": None, "request_timeout": PATIENCE, "rerank_gpu_timeout": 1.0}
        values |= {"max_sentences_per_request": 4, "max_body_bytes": 1 << 20}
        app = create_app(Settings.model_validate(values | settings))
        self.service: Service = replace(app.state.service, engine=self, buckets=self)
        self.spaces, self.embedding = space_of("first"), self
        self.planned: dict[str, list[Exception]] = {}
        self.ready: dict[str, asyncio.Event] = {}
        self.go = asyncio.Event()
        self.go.set()
        self.calls: list[list[str]] = []
        self.slots: list[int] = []
        self.width = 2

    @asynccontextmanager
    async def lease(self, model: str | None) -> AsyncIterator["Texts"]:
        assert model is None
        yield self

    def spaces_of(self, _: EmbedRequest) -> dict[str, VectorSpace]:
        return self.spaces

    async def embed(self, models: "Texts", request: EmbedRequest) -> EmbeddingResult:
        assert models is self
        texts, answer = request.texts, request.answer
        self.calls.append(texts)
        self.slots.append(self.service.stream_slots.held_by(request.client))
        await self.ready.get(texts[0], self.go).wait()
        for text in texts:
            if self.planned.get(text):
                raise self.planned[text].pop(0)
        vectors = [TextEmbedding(np.full(self.width, len(text), np.float32)) for text in texts]
        answer.need(8 * len(texts), *NEEDED)
        cuts = [Truncation("sentences", i, "m", 4, 9) for i, t in enumerate(texts) if "cut" in t]
        timings = Timings(tokenize=0, queue=0, inference=0.5, total=1)
        return EmbeddingResult(vectors, cuts, 3 * len(texts), timings)

    def embedder(self, client: str) -> PieceEmbedder:
        return PieceEmbedder(self.service, EmbedRequest([], client=client), space_of("first"))

    @property
    def counted(self) -> float:
        """The texts that the metrics tell of."""
        return self.service.metrics.total(self.service.metrics.sentences)

    @property
    def begun(self) -> list[str]:
        """The first text of each call."""
        return [texts[0] for texts in self.calls]


class Stream(Texts):
    """A stream with pieces of two lines, and its client.

    The client sends `parts`, and leaves where one is None; it reads while `reads` is set.
    """

    def __init__(self, *parts: bytes | None) -> None:
        super().__init__()
        self.parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        for part in parts:
            self.parts.put_nowait(part)
        self.reads = asyncio.Event()
        self.reads.set()
        self.sent: list[dict[str, Any]] = []
        self.written: list[int] = []
        self.held: list[int] = [0]
        self.taken = 0
        self.sends = False
        self.waits = [0.0] * 99
        self.observed: list[int] = []
        self.context = RequestContext("id", "/embeddings/stream", EMBEDDING_STREAM, "192.0.2.1")
        self.context.memory = self  # type: ignore[assignment]

    # The client.

    async def receive(self) -> dict[str, Any]:
        part = await self.parts.get()
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": part != b""}

    async def send(self, message: Any) -> None:
        self.sends = True
        await self.reads.wait()
        self.sends = False
        self.sent.append(message)

    @property
    def content(self) -> bytes:
        return b"".join(each["body"] for each in self.sent[1:])

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.content.splitlines()]

    # What it is counted by.

    def release_body(self, size: int) -> None:
        """Implement `StreamMemory`."""

    def hold_vectors(self, size: int) -> None:
        self.held.append(self.held[-1] + size)

    def release_vectors(self, size: int) -> None:
        self.held.append(self.held[-1] - size)

    async def take(self, key: str) -> float:
        """Implement `Buckets`."""
        assert key == "address:192.0.2.1"
        self.taken += 1
        return self.waits.pop()

    def observe(self, piece: Piece) -> None:
        self.observed.append(piece.tokens)

    # The stream.

    def begin(self, encoding: str | None = None) -> "asyncio.Task[None]":
        scope = {"type": "http", "headers": [], "state": {"context": self.context}}
        request = EmbedRequest([])
        options = RecordOptions(request, {"model_name": "d"}, (self.width, 8))
        writer = WRITERS[NDJSON](options)
        write = writer.write

        def counted(records: Sequence[Record]) -> Any:
            self.written.append(len(records))
            return write(records)

        writer.write = counted  # type: ignore[method-assign]
        size = PieceSize(1000)
        size.observe = self.observe  # type: ignore[method-assign]
        response = StreamResponse(
            Call(Request(scope), self.service),
            NdjsonReader(1 << 20),
            self.embedder(self.context.client),
            request,
            lambda: writer,
            max_lines=2,
            size=size,
            media_type=NDJSON,
            encoding=encoding,
        )
        return asyncio.create_task(response(scope, self.receive, self.send))

    async def whole(self) -> list[dict[str, Any]]:
        await asyncio.wait_for(self.begin(), 60)
        return self.records


async def until(condition: Any) -> None:
    """Others run meanwhile, on other threads, too."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError


async def test_records_come_in_order_whichever_piece_is_ready_first() -> None:
    """A bad line is counted, and has its record in its place."""
    stream = Stream(LINES.replace(b'"9"', b"9"), b"")
    stream.ready = {str(number): asyncio.Event() for number in range(0, 12, 2)}
    ended = stream.begin()
    await until(lambda: len(stream.begun) == PIECES)
    for first in ("6", "2", "4"):
        stream.ready[first].set()
    await turns(100)
    assert stream.begun == ["0", "2", "4", "6"], "no more until one of them is sent"
    assert stream.content == b""
    stream.ready["0"].set()
    await until(lambda: len(stream.begun) == 6 and len(stream.records) == 8)
    assert [each["id"] for each in stream.records] == list(range(8))
    for event in stream.ready.values():
        event.set()
    await ended
    assert [each["id"] for each in stream.records] == list(range(12))
    assert [each["error"]["line"] for each in stream.records if "error" in each] == [10]
    assert [each["more_body"] for each in stream.sent[1:]] == [True] * 6 + [False]
    assert stream.context.counts == {"sentences": 11, "failed": 1, "tokens": 33}
    assert stream.context.error_code is None
    assert stream.observed == [6, 6, 6, 6, 3, 6]
    assert (stream.held[-1], max(stream.held)) == (0, 64)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_compressed_stream_can_be_read_as_it_comes_and_has_an_end(encoding: str) -> None:
    stream = Stream(LINES[:16], b"")
    await asyncio.wait_for(stream.begin(encoding), 60)
    unpack = zstd.ZstdDecompressor() if encoding == "zstd" else zlib.decompressobj(wbits=31)
    parts = [unpack.decompress(each["body"]) for each in stream.sent[1:]]
    assert [part.count(b"\n") for part in parts] == [2, 2, 0]
    assert unpack.eof
    headers = dict(stream.sent[0]["headers"])
    assert headers[b"content-encoding"] == encoding.encode()
    assert headers[b"vary"] == b"Accept-Encoding"


async def test_it_begins_at_once_and_tells_proxies_not_to_wait_for_its_end() -> None:
    stream = Stream(LINES[:8])
    ended = stream.begin()
    await until(lambda: len(stream.sent) == 2)
    assert stream.sent[0]["status"] == 200
    headers = dict(stream.sent[0]["headers"])
    assert headers == {b"content-type": NDJSON.encode(), b"x-accel-buffering": b"no"}
    assert [each["id"] for each in stream.records] == [0, 1]
    stream.parts.put_nowait(b"")
    await ended
    assert stream.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_for_a_client_that_does_not_read_only_some_pieces_are_computed() -> None:
    stream = Stream(LINES * 9, b"")
    ended = stream.begin()
    await until(lambda: stream.sent)
    stream.reads.clear()
    await until(lambda: len(stream.observed) == len(stream.begun) >= PIECES)
    await turns(100)
    sent = len(stream.sent) - 1
    assert sent < 9
    assert len(stream.begun) <= PIECES + sent, "one more for each that was sent"
    stream.reads.set()
    await ended
    assert [each["id"] for each in stream.records] == list(range(108))


@pytest.mark.parametrize("drains", [True, False])
async def test_an_error_that_ends_it_comes_behind_what_was_computed(*, drains: bool) -> None:
    """That the service ends, or cannot go on with a piece."""
    stream = Stream(LINES[:16] if drains else LINES, *[] if drains else [b""])
    stream.ready = {"4": asyncio.Event()}
    stream.planned["4"] = [UnavailableError("no device")]
    ended = stream.begin()
    await until(lambda: len(stream.records) == 4)
    stream.service.drain.wake() if drains else stream.ready["4"].set()
    await ended
    *before, last = stream.records
    assert [each["id"] for each in before] == [0, 1, 2, 3]
    assert "id" not in last
    error = last["error"]
    assert (error["status"], error.get("retry_after")) == (503, 5 if drains else None)
    assert error["code"] == ("draining" if drains else UnavailableError.code)
    assert drains or error["detail"] == "No device."
    assert (stream.context.error_code, stream.context.error_status) == (error["code"], 503)
    assert stream.context.counts["sentences"] == 4


async def test_a_client_that_leaves_ends_the_work_and_is_noted() -> None:
    stream = Stream(LINES)
    stream.ready = {"4": asyncio.Event()}
    ended = stream.begin()
    await until(lambda: len(stream.begun) == 6)  # Two are sent and counted.
    stream.parts.put_nowait(None)
    await ended
    assert stream.context.error_code == "client_gone"
    assert stream.context.counts == {"sentences": 4, "failed": 0, "tokens": 12}
    assert len(asyncio.all_tasks()) == 1


async def test_lines_beyond_those_of_a_request_are_paid_for_as_further_requests() -> None:
    stream = Stream(LINES, b"")
    stream.waits = [0.0, 0.0, 0.001]
    await stream.whole()
    # The first four lines are those of the request itself; one wait was for nothing.
    assert stream.taken == 3
    stream = Stream(LINES[:16], b"")
    await stream.whole()
    assert stream.taken == 0


@pytest.mark.parametrize(("width", "units"), [(1 << 17, [2] * 6), (1 << 18, [1] * 12)])
async def test_a_mebibyte_of_vectors_is_rendered_at_a_time(width: int, units: list[int]) -> None:
    stream = Stream(LINES, b"")
    stream.width = width
    assert len(await stream.whole()) == 12
    assert stream.written == units


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The time for which a client reads nothing, which is looked at often."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr("smart_embedder.api.stream.answer._LOOK_SECONDS", 0.001)
    return clock


async def test_one_that_reads_nothing_for_too_long_gets_whole_records_and_the_error(clock) -> None:
    long = b'"%b"\n' % (b"a" * 100_000)
    stream = Stream(*[long] * 30)
    ended = stream.begin()
    await until(lambda: len(stream.records) >= 1)
    clock.now += 10 * PATIENCE  # While it waits for nothing to be read.
    stream.reads.clear()
    for _ in range(60):
        stream.parts.put_nowait(long)
    await until(lambda: stream.sends)
    clock.now += PATIENCE - 1
    await turns(100)
    received = stream.parts.qsize()
    assert received, "no more is read ahead than a body may have"
    clock.now += 1
    await until(stream.parts.empty)
    stream.reads.set()
    await ended
    *before, last = stream.records
    assert all("embeddings" in each for each in before)
    assert (last["error"]["status"], last["error"]["code"]) == (408, "answer_not_taken")


async def test_what_is_not_sent_any_more_is_not_computed_and_keeps_no_stream(clock) -> None:
    """As pieces that wait for the memory of one before them, which is never sent."""
    first, never = (b'"%b"\n' % (each * 100_000) for each in (b"a", b"b"))
    stream = Stream(*[first] * 2, *[never] * 90)
    stream.ready["b" * 100_000] = asyncio.Event()
    stream.go.clear()
    ended = stream.begin()
    await until(lambda: stream.sent)
    stream.reads.clear()
    stream.go.set()
    await until(lambda: stream.sends)
    clock.now += PATIENCE
    await until(stream.parts.empty)
    stream.reads.set()
    await asyncio.wait_for(ended, 60)
    assert stream.records[-1]["error"]["code"] == "answer_not_taken"
    assert len(stream.begun) > 1


FORWARD = 1000


def piece(lines: int, tokens: int, seconds: float, nbytes: int) -> Piece:
    """A piece of lines of 100 bytes."""
    made = Piece(PieceMemory(1))
    made.results = [LineResult(Line(i + 1, i, 100), TextEmbedding()) for i in range(lines)]
    made.tokens, made.nbytes, made.seconds = tokens, nbytes, seconds
    return made


@pytest.mark.parametrize(
    ("observed", "lines"),
    [
        # 20 tokens a line, and a second for a forward.
        (piece(100, 2000, 2.0, 1000), 50),
        # A millisecond for a forward: a tenth of a second are 100 forwards.
        (piece(50, 1000, 0.001, 50), 100 * 50),
        # Large vectors keep a piece small.
        (piece(50, 1000, 0.001, 1 << 30), 50),
    ],
)
def test_a_piece_has_the_tokens_of_a_forward_or_of_several_quick_ones(observed, lines) -> None:
    size = PieceSize(FORWARD)
    for _ in range(20):
        size.observe(observed)
    assert size.bytes == 100 * lines


def test_one_piece_changes_the_size_by_a_factor_of_two_at_most() -> None:
    size = PieceSize(FORWARD)
    first = size.bytes
    for observed, factor in (
        (piece(500, 1, 1.0, 1), 2),
        (piece(1, 500, 1.0, 1), 1),
        (piece(1, 500, 1.0, 1), 0.5),
        (piece(1, 0, 0.0, 0), 0.5),  # Of errors alone.
    ):
        size.observe(observed)
        assert size.bytes == factor * first


def test_pieces_hold_no_more_together_than_one_answer_but_the_oldest_goes_on() -> None:
    memory = PieceMemory(100)
    first, second, third = (Piece(memory) for _ in range(3))
    second.need(60, *NEEDED)
    with pytest.raises(QueueFullError, match="come before"):
        third.need(60, *NEEDED)
    # What a piece has computed counts beside what it computes.
    second.nbytes = 60
    second.need(40, *NEEDED)
    with pytest.raises(QueueFullError):
        second.need(41, *NEEDED)
    first.need(90, *NEEDED)
    with pytest.raises(InvalidRequestError, match="MAX_ANSWER_BYTES"):
        first.need(101, *NEEDED)
    second.end()
    ended = memory.freed
    first.end()
    assert ended.is_set()
    third.need(100, *NEEDED)


async def piece_of(engine: Texts, *texts: str | Exception) -> Piece:
    """A piece of texts as lines from number 1; an error is a line that holds none."""
    lines = [
        Line(i, f"id {i}", 10, each) if isinstance(each, str) else Line(i, i, 10, error=each)
        for i, each in enumerate(texts, 1)
    ]
    piece = Piece(PieceMemory(1000))
    await engine.embedder("Alice").embed(lines, piece)
    assert [each.line for each in piece.results] == lines
    assert engine.service.stream_slots.held == 0
    assert set(engine.slots) <= {1}
    return piece


async def test_lines_after_the_model_was_replaced_are_refused_by_name() -> None:
    texts = Texts()
    assert outcomes(await piece_of(texts, "a", "bc")) == [1, 2]
    texts.spaces = space_of("second")
    before = len(texts.calls)
    refused = outcomes(await piece_of(texts, "a"))
    assert "weights: second, was first" in str(refused[0])
    assert len(texts.calls) == before


def outcomes(piece: Piece) -> list[object]:
    """The number in each vector, or the error."""
    outcomes = (each.outcome for each in piece.results)
    return [each.dense[0] if isinstance(each, TextEmbedding) else each for each in outcomes]


async def test_lines_that_hold_no_text_keep_their_places_and_cost_no_forward() -> None:
    texts, bad = Texts(), InvalidRequestError("no text")
    piece = await piece_of(texts, bad, "a", bad, "cut", bad)
    assert outcomes(piece) == [bad, 1, bad, 3, bad]
    assert [len(each.truncations) for each in piece.results] == [0, 0, 0, 1, 0]
    assert texts.calls == [["a", "cut"]]
    assert (piece.tokens, piece.nbytes, piece.seconds) == (6, 16, 0.5)
    assert texts.counted == 2
    assert outcomes(await piece_of(texts, bad, bad)) == [bad, bad]
    assert len(texts.calls) == 1, "only bad lines ask for nothing"


@pytest.mark.parametrize("error", [OutOfMemoryError, InferenceError, InvalidRequestError])
async def test_an_error_that_one_text_causes_is_that_texts_alone(error) -> None:
    bad = [error(f"the {i}. time") for i in range(9)]
    texts = Texts()
    texts.planned["worse"] = bad[:]
    piece = await piece_of(texts, "a", "bb", "worse", "dddd", "eeeee")
    assert outcomes(piece) == [1, 2, bad[2], 4, 5]
    assert [len(call) for call in texts.calls] == [5, 2, 3, 1, 2]
    assert (piece.tokens, piece.nbytes, piece.seconds) == (12, 32, 1.0)
    assert texts.counted == 4


async def test_after_a_timeout_no_halves_are_tried() -> None:
    late = InferenceTimeoutError("late")
    texts = Texts()
    texts.planned["a"] = [late]
    assert outcomes(await piece_of(texts, "a", "b")) == [late, late]
    assert len(texts.calls) == 1


async def test_a_service_that_cannot_go_on_ends_the_piece() -> None:
    texts = Texts()
    texts.planned["a"] = [UnavailableError("the device has failed")]
    with pytest.raises(UnavailableError, match="the device"):
        await piece_of(texts, "a", "b")
    assert (len(texts.calls), texts.service.stream_slots.held) == (1, 0)


@pytest.mark.parametrize(
    ("error", "pause"),
    [
        (QueueFullError("full"), 1),
        (QueueFullError("full", retry_after=7), 7),
        (LoadingError("it is loaded again", retry_after=3), 3),
    ],
)
async def test_while_there_is_no_place_it_waits_as_long_as_it_is_told(
    error, pause, monkeypatch
) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append((seconds, texts.service.stream_slots.held))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    texts = Texts()
    texts.planned["a"] = [error, error]
    assert outcomes(await piece_of(texts, "a")) == [1]
    assert pauses == [(pause, 0)] * 2


async def test_without_room_it_goes_on_when_a_piece_before_it_is_sent() -> None:
    texts, memory = Texts(), PieceMemory(20)
    first, second = Piece(memory), Piece(memory)
    first.need(16, *NEEDED)
    lines = [Line(1, 0, 10, "a")]
    waiting = asyncio.ensure_future(texts.embedder("Alice").embed(lines, second))
    for _ in range(3):
        await asyncio.sleep(0)
    assert (len(texts.calls), texts.service.stream_slots.held, waiting.done()) == (1, 0, False)
    first.end()
    await waiting
    assert outcomes(second) == [1]
    assert len(texts.calls) == 2


def made(cuts: tuple[Truncation, ...] = ()) -> LineResult:
    colbert = np.ones((8, 4), np.float32)
    embedding = TextEmbedding(np.ones(4, np.float32), None, colbert)
    return LineResult(Line(7, "its id", 10, "a"), embedding, TokenStrings(None, ["a"] * 8), cuts)


def test_a_record_holds_what_is_made_of_the_vectors_and_which_line_was_cut() -> None:
    options = EmbedRequest([], Outputs(dense=True, colbert=True), output_dtype="int8")
    cut = Truncation("sentences", 3, "m", 4, 9)
    record = made((cut,)).record(options, 1 << 20)
    assert (record.id, record.error) == ("its id", None)
    assert record.vectors.dense.values.dtype == np.int8
    assert record.vectors.colbert.values.shape == (8, 4)
    assert record.vectors.tokens == TokenStrings(None, ["a"] * 8)
    (warning,) = record.warnings
    assert warning["target"] == {"field": "text", "index": 6, "pointer": "/text"}
    assert warning["details"]["original_tokens"] == 9
    failed = LineResult(Line(7, "its id", 10), InvalidRequestError("no text")).record(None, 9)
    told = (failed.id, failed.error["line"], failed.error["code"])
    assert told == ("its id", 7, "invalid_request")


def test_what_post_processing_takes_too_much_for_is_that_lines_error() -> None:
    options = EmbedRequest([], Outputs(colbert=True), colbert_pool_factor=2)
    memory = AnswerMemory()
    hold_rendering([made().outcome], options, memory)
    needed = memory.held
    assert made().record(options, needed).vectors.colbert.values.shape[0] < 8
    refused = made().record(options, needed - 1)
    assert (refused.id, refused.vectors, refused.error["line"]) == ("its id", None, 7)
    assert refused.error["code"] == "invalid_request"
    assert "leave out colbert_pool_factor" in refused.error["detail"]

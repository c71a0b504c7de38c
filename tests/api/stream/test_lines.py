"""Lines of a body: taken in bounded steps while more arrives, and what is wrong with one.

That the same lines come out of it whatever its pieces: tests/fuzzing.
"""

import asyncio
import json
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from smart_embedder.api.stream.answer import LineReader, StreamBody
from smart_embedder.api.stream.arrow_lines import ArrowReader
from smart_embedder.api.stream.lines import (
    STEP_BYTES,
    Line,
    NdjsonReader,
)
from smart_embedder.errors import (
    AnswerNotTakenError,
    BodyStalledError,
    BodyTooLargeError,
    ClientGoneError,
    DrainingError,
    InvalidRequestError,
)
from tests.fuzzing.inputs import lines_of, result_of
from tests.support.skipped_time import in_skipped_time, now, turns

MOST = 200


def take(reader: LineReader, max_lines: int, max_bytes: int) -> list[Line]:
    """The next lines, all steps at once."""
    lines: list[Line] = result_of(reader.take(max_lines, max_bytes))
    return lines


def read(*parts: bytes, most: int = MOST) -> list[Line]:
    return [*lines_of(NdjsonReader(most), parts)]


def facts(line: Line) -> tuple:
    return line.number, line.id, line.text, str(line.error) if line.error else None


def test_a_line_without_an_id_has_its_place_among_the_records() -> None:
    lines = read(b'{"text": "a"}\n\n{"id": "x", "text": "b"}\n"c"\n{"id": -7, "text": ""}')
    found = [facts(line)[:3] for line in lines]
    assert found == [(1, 0, "a"), (3, "x", "b"), (4, 2, "c"), (5, -7, "")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}", "the field text is missing"),
        (b'{"content": "a"}', "content is none: call it text"),
        (b'{"text": 1}', "the field text is a number: send a string"),
        (b'{"text": "a", "id": 1.5}', "the field id: send a string, or a whole number of 64 bits"),
        (b'{"text": "a", "id": true}', "the field id: send a string"),
        (b'{"text": "a", "id": 9223372036854775808}', "the field id: send a string"),
        (b'{"text": "a", "dimensions": 3}', "there is no field dimensions here"),
        (b"[1]", "the line is a list"),
        (b"nonsense", "the line of 8 bytes is no JSON"),
        (b'{"text":"\\ud800"}', "the line of 17 bytes is no JSON"),
        (b"\xef\xbb\xbf1", "the line of 4 bytes is no JSON"),
        (b'"\xff"', "the line of 3 bytes is no JSON"),
    ],
)
def test_what_is_wrong_with_a_line_is_told(line: bytes, message: str) -> None:
    before, bad, after = read(b'"a"\n' + line + b'\n"b"')
    assert (before.text, after.text, after.id) == ("a", "b", 2)
    assert isinstance(bad.error, InvalidRequestError)
    assert message in str(bad.error)
    assert (bad.number, bad.id) == (2, 1)


def test_a_line_that_is_too_large_is_an_error_and_is_not_kept() -> None:
    reader = NdjsonReader(MOST)
    for _ in range(1000):
        reader.feed(b"x" * 100)
        assert reader.buffered <= MOST
    reader.feed(b'\n"a"\n')
    bad, good = take(reader, 10, 1 << 20)
    assert isinstance(bad.error, BodyTooLargeError)
    assert "MAX_BODY_BYTES" in str(bad.error)
    assert (good.text, good.number) == ("a", 2)


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a", ' + b",".join(b'"%d": 0' % i for i in range(6000)) + b"}",
        b'{"text": "a", "id": [' + b"[]," * 20_000 + b"[]]}",
        b'{"text": [' + b"1," * 100_000 + b"1]}",
        b"[" * 60_000,
        b'{"text": "a", "id": ' + b'{"a":' * 10_000,
    ],
    ids=["names", "lists", "values", "brackets", "nested names"],
)
def test_a_line_of_many_values_is_refused_before_it_is_parsed_whatever_its_size(line) -> None:
    (read_line,) = read(line, most=1 << 20)
    assert "more than 16 values" in str(read_line.error)
    (line,) = read(json.dumps({"text": "a, b: [c] {d}" * 10_000}).encode(), most=1 << 20)
    assert line.error is None


def test_blanks_that_a_line_begins_with_are_looked_at_once() -> None:
    reader = NdjsonReader(1 << 22)
    for _ in range(16):
        reader.feed(b" \t" * (1 << 16))
        assert not reader.ready
        # What is not kept cannot be looked at again.
        assert reader.buffered == 0
    reader.feed(b"\n" * (1 << 20) + b'"a"\n')
    (line,) = take(reader, 9, 9)
    assert (line.number, line.text, line.size) == ((1 << 20) + 1, "a", 3)


def test_a_piece_holds_few_bad_lines() -> None:
    reader = NdjsonReader(MOST)
    reader.feed(b"}\n" * 1000 + b'"a"\n' * 1000)
    taken = []
    while reader.ready:
        taken.append(take(reader, 512, 1 << 20))
    assert sum(map(len, taken)) == 2000
    assert max(sum(line.error is not None for line in lines) for lines in taken) <= 64
    assert max(map(len, taken)) == 512


def test_a_large_line_is_parsed_in_steps_while_more_is_read() -> None:
    text = "\\u00e9" * 300_000
    reader = NdjsonReader(2_000_000)
    reader.feed(b'\n{"text": "%b"}\n' % text.encode())
    steps = reader.take(9, 1 << 22)
    for part in [b"\n\n", b'{"id": "x",', b' "text": "a"}', b"\n", b" " * 999_999, b'"b"\n']:
        next(steps)
        reader.feed(part)
        assert isinstance(reader.ready, bool)
    large, *others = result_of(steps)
    assert (large.number, large.id, large.text) == (2, 0, "é" * 300_000)
    others += take(reader, 9, 1 << 22)
    assert [facts(line) for line in others] == [(5, "x", "a", None), (6, 2, "b", None)]


def test_as_many_are_taken_as_asked_for_in_steps_of_64_kib() -> None:
    reader = NdjsonReader(1 << 20)
    reader.feed(b'"aaaa"\n' * 10)
    for most, size, count in ((3, 1000, 3), (100, 12, 2), (100, 0, 1), (100, 1000, 4)):
        assert len(take(reader, most, size)) == count
    assert not reader.ready
    assert take(reader, 1, 1) == []
    line = json.dumps({"text": "\u0436" * 600}).encode() + b"\n"
    reader.feed(line * 400)
    begins = [0, *(reader._begin for _ in reader.take(400, 1 << 30))]
    steps = [after - before for before, after in pairwise(begins)]
    assert max(steps) <= 65_536 + len(line)
    assert len(steps) >= len(line) * 400 // (65_536 + len(line))


def test_what_arrives_while_lines_are_taken_is_not_counted_with_them() -> None:
    reader = NdjsonReader(2 * STEP_BYTES)
    reader.feed(json.dumps({"text": "a" * STEP_BYTES}).encode() + b'\n{"text": "b')
    steps = reader.take(2, 1 << 30)
    next(steps)
    reader.feed(b"c")
    (large,) = result_of(steps)
    reader.feed(b'"}\n')
    (small,) = take(reader, 2, 1000)
    assert [len(large.text), small.text] == [STEP_BYTES, "bc"]


MIB = 1 << 20
PATIENCE = 90.0
# 16 of them are what is read ahead.
PART = b'"' + b"a" * 65_533 + b'"\n'
GONE: dict[str, Any] = {"type": "http.disconnect"}


class Client:
    """Sends `parts`, then nothing more; `held` is what the service has not released of them."""

    def __init__(self, *parts: Any, reader: LineReader | None = None, max_ahead=2 * MIB) -> None:
        self.parts: list[Any] = list(parts)
        self.received = self.held = self.steps = 0
        self.stalled, self.closing = 0.0, False
        self.came = asyncio.Event()
        self.body = StreamBody(
            self._receive,
            reader or NdjsonReader(4 * MIB),
            self,  # type: ignore[arg-type]
            lambda: self.stalled,
            lambda: self.closing,
            run=self._run,
            max_ahead=max_ahead,
            patience=PATIENCE,
        )

    async def _receive(self) -> Any:
        while not self.parts:
            self.came.clear()
            await self.came.wait()
        part = self.parts.pop(0)
        if isinstance(part, Exception):
            raise part
        if isinstance(part, dict):
            return part
        self.received += 1
        self.held += len(part)
        # What ASGI lets a server leave out is left out.
        more = {"body": part, "more_body": True} if part else {}
        return {"type": "http.request"} | more

    def release_body(self, size: int) -> None:
        assert size > 0
        self.held -= size

    def send(self, *parts: Any) -> None:
        self.parts += parts
        self.came.set()

    async def _run(self, steps: Generator[None, None, list[Line]]) -> list[Line]:
        """Others have their turns meanwhile."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                await turns()
                self.steps += 1
                lines: list[Line] = end.value
                return lines

    def begin_reading(self) -> "asyncio.Task[None]":
        return asyncio.create_task(self.body.read())

    async def texts(self, count: int = 512) -> list[str]:
        return [line.text for line in await self.body.take(count, MIB)]


def arrow(*texts: str) -> bytes:
    """A stream of them, each in a batch of its own."""
    table, sink = pa.table({"text": texts}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    return bytes(sink.getvalue())


async def cancelled(task: "asyncio.Task[Any]") -> None:
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


@in_skipped_time
async def test_lines_are_taken_in_order_as_they_arrive_and_none_follow_the_last() -> None:
    client = Client(b'"a"\n"b"\n"c"')
    takes = asyncio.create_task(client.texts(1))
    reads = client.begin_reading()
    await asyncio.sleep(0)
    assert client.steps == 0
    assert await takes == ["a"]
    assert client.steps == 2, "it is not looked again and again while nothing comes"
    assert await client.texts() == ["b"]
    takes = asyncio.create_task(client.texts())
    await turns(50)
    looked = client.steps
    await turns(50)
    assert (takes.done(), client.steps) == (False, looked), (
        "it does not look for lines all the time"
    )
    client.send(b'\n"d"')
    assert await takes == ["c"]
    takes = asyncio.create_task(client.texts())
    client.send(b"\n", b"\n", b"")
    assert await takes == ["d"]
    assert await client.texts() == await client.texts() == []
    assert client.held == 0
    await cancelled(reads)


@in_skipped_time
async def test_the_beginning_is_as_much_as_tells_how_lines_are_read() -> None:
    whole = arrow("a")
    for client, needed in (
        (Client(whole[:20], whole[20:40], whole[40:], b"", reader=ArrowReader(MIB)), 3),
        (Client(b'"a', b'"\n'), 1),
        (Client(b""), 1),
    ):
        await client.body.begin()
        assert client.received == needed


@pytest.mark.parametrize(
    ("stalled", "max_ahead", "parts"),
    [(0.0, 2 * MIB, 16), (0.99, 2 * MIB, 16), (1.0, 2 * MIB, 32), (1.0, 100, 16)],
)
@in_skipped_time
async def test_a_mebibyte_is_read_ahead_and_a_body_where_the_client_reads_nothing(
    stalled: float, max_ahead: int, parts: int
) -> None:
    client = Client(*[PART] * 40, max_ahead=max_ahead)
    client.stalled = stalled
    reads = client.begin_reading()
    await asyncio.sleep(30)
    assert (client.received, client.held) == (parts, parts * len(PART))
    # What is taken makes room at once.
    began = now()
    assert len(await client.body.take(3, MIB)) == 3
    await turns()
    assert (client.received, client.held, now()) == (parts + 3, parts * len(PART), began)
    await cancelled(reads)


@in_skipped_time
async def test_a_line_is_read_to_its_end_and_blank_ones_are_released_as_they_arrive() -> None:
    client = Client(*[b"\n" * 1000] * 3, b'"', *[b"a" * MIB] * 3, b'"\n', PART)
    reads = client.begin_reading()
    await turns(20)
    assert client.received == 8, "a whole line waits, and fills what is read ahead"
    assert client.held == 3 * MIB + 3, "and no blank line is held"
    assert await client.texts() == ["a" * 3 * MIB]
    await cancelled(reads)


@in_skipped_time
async def test_one_that_reads_nothing_is_given_up_and_the_rest_of_its_body_is_dropped() -> None:
    client = Client(*[PART] * 40)
    client.stalled = PATIENCE - 0.1
    reads = client.begin_reading()
    await asyncio.sleep(1)
    assert (client.body.given_up, client.received) == (None, 32)
    client.stalled = PATIENCE
    await asyncio.sleep(1)
    assert client.received == 40
    assert client.held <= 32 * len(PART), "what is dropped is held no more"
    assert isinstance(client.body.given_up, AnswerNotTakenError)
    assert "for 90 seconds (REQUEST_TIMEOUT)" in str(client.body.given_up)
    assert "2097152 bytes" in str(client.body.given_up)
    with pytest.raises(AnswerNotTakenError):
        await client.texts()
    client.send(GONE)
    with pytest.raises(ClientGoneError):
        await reads


@in_skipped_time
async def test_one_that_leaves_is_noticed_while_it_sends_waits_and_has_sent_everything() -> None:
    sending, waiting, sent = Client(b'"a"\n', GONE), Client(*[PART] * 16), Client(b'"a"', b"", GONE)
    for client in (sending, sent):
        with pytest.raises(ClientGoneError):
            await client.body.read()
    with pytest.raises(ClientGoneError):
        await Client(GONE).body.begin()
    reads = waiting.begin_reading()
    await asyncio.sleep(1)
    assert not reads.done()
    waiting.closing = True
    with pytest.raises(ClientGoneError):
        await reads


@pytest.mark.parametrize(
    ("reader", "parts", "error"),
    [
        (NdjsonReader(MIB), [b'"a"\n"b"\n', BodyStalledError("late")], BodyStalledError),
        (ArrowReader(MIB), [arrow("a", "b"), BodyStalledError("late")], BodyStalledError),
        (ArrowReader(MIB), [arrow("a", "b", "c")[:-50], b""], InvalidRequestError),
    ],
    ids=["lines", "Arrow", "Arrow that ends too early"],
)
@in_skipped_time
async def test_an_error_of_the_body_comes_behind_the_lines_before_it(
    reader: LineReader, parts: list[Any], error: type[Exception]
) -> None:
    client = Client(*parts, b"more", b"and more", reader=reader)
    reads = client.begin_reading()
    await turns(20)
    assert client.parts == [], "what follows is received, so that the client can read the error"
    assert [await client.texts(1), await client.texts(1)] == [["a"], ["b"]]
    for _ in range(2):
        with pytest.raises(error):
            await client.texts()
    await cancelled(reads)


@in_skipped_time
async def test_one_that_is_stopped_says_why_first_and_takes_nothing_more() -> None:
    client = Client()
    takes = asyncio.create_task(client.texts())
    reads = client.begin_reading()
    await turns()
    client.body.stop(DrainingError("the first"))
    client.body.stop(DrainingError("another"))
    with pytest.raises(DrainingError, match="the first"):
        await takes
    client.send(b'"a"\n')
    await turns()
    with pytest.raises(DrainingError, match="the first"):
        await client.texts()
    await cancelled(reads)

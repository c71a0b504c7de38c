"""The body of a stream: how far it is read ahead, what it holds, and how it ends."""

import asyncio
from collections.abc import Generator
from typing import Any

import pyarrow as pa
import pytest

from smart_embedder.api.stream.arrow_lines import ArrowReader
from smart_embedder.api.stream.lines import Line, LineReader, NdjsonReader, StreamBody
from smart_embedder.errors import (
    AnswerNotTakenError,
    BodyStalledError,
    ClientGoneError,
    DrainingError,
    InvalidRequestError,
)
from tests.support.skipped_time import in_skipped_time, now, turns

MIB = 1 << 20
PATIENCE = 90.0
# 16 of them are what is read ahead.
PART = b'"' + b"a" * 65_533 + b'"\n'
GONE: dict[str, Any] = {"type": "http.disconnect"}


class Client:
    """Sends `parts`, then nothing more; `held` is what the service has not released of them."""

    def __init__(self, *parts: Any, reader: LineReader | None = None, **limits: Any) -> None:
        self.parts: list[Any] = list(parts)
        self.received = 0
        self.held = 0
        self.stalled = 0.0
        self.closing = False
        self.came = asyncio.Event()
        self.steps = 0
        self.body = StreamBody(
            self._receive,
            reader or NdjsonReader(4 * MIB),
            self,  # type: ignore[arg-type]
            lambda: self.stalled,
            lambda: self.closing,
            run=self._run,
            **{"max_ahead": 2 * MIB, "patience": PATIENCE} | limits,
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
    await client.body.begin()
    reads = client.begin_reading()
    assert await client.texts(1) == ["a"]
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
async def test_a_line_that_arrives_while_others_are_looked_for_is_taken() -> None:
    client = Client()
    takes = asyncio.create_task(client.texts())
    reads = client.begin_reading()
    await asyncio.sleep(0)
    assert client.steps == 0
    client.send(b'"a"\n', b"")
    assert await takes == ["a"]
    assert client.steps == 2, "it is not looked again and again while nothing comes"
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
async def test_a_line_is_read_to_its_end_whatever_its_length() -> None:
    client = Client(b'"', *[b"a" * MIB] * 3, b'"\n', PART)
    reads = client.begin_reading()
    await turns(20)
    assert client.received == 5, "a whole line waits, and fills what is read ahead"
    assert await client.texts() == ["a" * 3 * MIB]
    await cancelled(reads)


@in_skipped_time
async def test_blank_lines_are_released_as_they_arrive() -> None:
    client = Client(*[b"\n" * 1000] * 3, b'"a"\n')
    reads = client.begin_reading()
    await turns()
    assert client.parts == []
    assert client.held <= 1004, "the last part at most"
    assert await client.texts() == ["a"]
    assert client.held == 0
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

"""413 before a body is read whole; unpacking costs what its bytes cost, however they are packed."""

import asyncio
import gzip
import zlib

import pytest

from smart_embedder.engine.scheduling.fairness import LoopTurns
from smart_embedder.errors import BodyTooLargeError, InvalidRequestError
from smart_embedder.middleware import body as unpack_body
from smart_embedder.middleware.body import LimitBody
from tests.middleware.exchange import Inner, exchange, part_of


@pytest.mark.parametrize(
    ("parts", "announced", "path", "outcome"),
    [
        pytest.param([b"a"], b"100", "/rerank", 200, id="announced"),
        pytest.param([b"a"], b"x", "/rerank", 200, id="announced badly"),
        pytest.param([b"a"], b"101", "/rerank", 413, id="announced too large"),
        pytest.param([b"a" * 60, b"a" * 40], None, "/rerank", 200, id="sent"),
        pytest.param([b"a" * 60, b"a" * 41, b"no"], None, "/rerank", None, id="sent too large"),
        pytest.param([b"a" * 200], b"200", "/embeddings/stream", 200, id="a stream"),
    ],
)
async def test_a_body_too_large_is_refused_before_it_is_read_or_at_the_byte_too_many(
    parts, announced, path, outcome
) -> None:
    inner = Inner()
    headers = [] if announced is None else [(b"content-length", announced)]
    request = exchange(LimitBody(inner, 100, LoopTurns()), *parts, path=path, headers=headers)
    if outcome is None:
        with pytest.raises(BodyTooLargeError):
            await request
        return
    _, sent = await request
    assert sent[0]["status"] == outcome
    assert inner.body == (b"".join(parts) if outcome == 200 else None)
    if outcome == 413:
        assert b"larger than 100 bytes (MAX_BODY_BYTES)" in sent[1]["body"]


# Unpacking.

EMPTY = gzip.compress(b"", mtime=0)
TINY = gzip.compress(b" ", mtime=0)
PACKED = [(b"content-encoding", b"gzip")]


async def unpack(*messages: bytes) -> list[bytes]:
    """The pieces that come out of a stream that arrives in these messages."""
    pieces = []

    async def read(_scope, receive, _send) -> None:
        more = True
        while more:
            message = await receive()
            pieces.append(message["body"])
            more = message["more_body"]

    app = LimitBody(read, 1, LoopTurns())
    await exchange(app, *messages, path="/embeddings/stream", headers=PACKED)
    assert pieces.pop() == b""
    return pieces


async def test_what_small_members_hold_comes_together() -> None:
    pieces = await unpack(TINY * 10_240)
    assert b"".join(pieces) == b" " * 10_240
    assert len(pieces) <= 40


async def test_no_byte_of_small_members_is_read_many_times(monkeypatch) -> None:
    read = 0

    class Counted:
        def __init__(self, **options: int) -> None:
            self._unpacker = zlib.decompressobj(**options)

        def decompress(self, data: bytes, most: int) -> bytes:
            nonlocal read
            read += len(data)
            return self._unpacker.decompress(data, most)

        def __getattr__(self, name: str):
            return getattr(self._unpacker, name)

    class Zlib:
        error, decompressobj = zlib.error, Counted

    monkeypatch.setattr(unpack_body, "zlib", Zlib)
    packed = TINY * 3000
    await unpack(packed)
    assert read < 16 * len(packed)


async def test_others_run_while_small_members_are_unpacked() -> None:
    passes = 0

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await unpack(TINY * 10_000)
    counting.cancel()
    assert passes >= 40


@pytest.mark.parametrize("messages", [[EMPTY * 2000], [EMPTY * 10] * 200], ids=["one", "many"])
async def test_a_body_of_empty_members_is_refused(messages) -> None:
    with pytest.raises(InvalidRequestError, match="more than 1000 of its members in a row"):
        await unpack(*messages)


async def test_empty_members_between_others_are_no_fault() -> None:
    assert await unpack((EMPTY * 900 + TINY) * 3 + EMPTY) != []


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 131_072])
@pytest.mark.parametrize("further", [[], [b"more"]])
async def test_a_member_that_fills_a_piece_is_whole_and_so_is_what_follows(size, further) -> None:
    members = [b"a" * size, *further]
    assert b"".join(await unpack(b"".join(map(gzip.compress, members)))) == b"".join(members)


@pytest.mark.parametrize("more", [True, False], ids=["in the middle", "after the end"])
async def test_a_client_that_leaves_a_packed_body_has_left(more: bool) -> None:
    gone = {"type": "http.disconnect"}
    messages = [part_of({"body": TINY, "more_body": more}), gone, gone]
    received: list[dict[str, object]] = []

    async def receive():
        return messages.pop(0)

    async def read(_scope, receive, _send) -> None:
        while messages:
            received.append(await receive())

    async def leave(scope, _receive, send) -> None:
        await LimitBody(read, 100, LoopTurns())(scope, receive, send)

    await exchange(leave, path="/embeddings/stream", headers=PACKED)
    end = {"type": "http.request", "body": b"", "more_body": False}
    assert received == [
        {"type": "http.request", "body": b" ", "more_body": True},
        *([] if more else [end]),
        gone,
        gone,
    ]


async def test_what_is_packed_counts_like_what_is_unpacked() -> None:
    """Members without content are as large as they are."""
    with pytest.raises(BodyTooLargeError, match="larger than 100 bytes"):
        await exchange(LimitBody(Inner(), 100, LoopTurns()), EMPTY * 6, headers=PACKED)
    inner = Inner()
    await exchange(LimitBody(inner, 100, LoopTurns()), EMPTY * 5, headers=PACKED)
    assert inner.body == b""


@pytest.mark.parametrize("encoding", [b"gzip", b"identity, GZIP ,"])
async def test_what_is_unpacked_no_longer_says_that_it_is_packed_or_how_long(encoding) -> None:
    inner, packed = Inner(), gzip.compress(b"text")
    headers = [(b"content-encoding", encoding), (b"content-length", b"%d" % len(packed))]
    await exchange(LimitBody(inner, 100, LoopTurns()), packed, headers=[*headers, (b"a", b"b")])
    assert inner.scope["headers"] == [(b"a", b"b")]
    assert inner.body == b"text"


@pytest.mark.parametrize("encoding", [b"br", b"identity", b"gzip, gzip"])
async def test_what_is_packed_otherwise_is_left_as_it_is(encoding: bytes) -> None:
    inner, headers = Inner(), [(b"content-encoding", encoding)]
    await exchange(LimitBody(inner, 100, LoopTurns()), b"text", headers=headers)
    assert (inner.scope["headers"], inner.body) == (headers, b"text")


@pytest.mark.parametrize(
    ("size", "path", "refused"),
    [(100, "/rerank", False), (101, "/rerank", True), (101, "/embeddings/stream", False)],
)
async def test_a_body_may_unpack_to_what_a_body_may_hold_and_a_stream_to_anything(
    size: int, path: str, refused: bool
) -> None:
    inner, packed = Inner(), gzip.compress(b"a" * size)
    request = exchange(LimitBody(inner, 100, LoopTurns()), packed, path=path, headers=PACKED)
    if refused:
        with pytest.raises(BodyTooLargeError, match="the unpacked body is larger than 100 bytes"):
            await request
    else:
        await request
        assert inner.body == b"a" * size


@pytest.mark.parametrize(
    ("content", "reason"),
    [(EMPTY[:-1], "ends too early"), (b"", "ends too early"), (b"what is this", "header")],
)
async def test_a_body_that_is_no_gzip_is_refused_with_the_reason(content, reason) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        await exchange(LimitBody(Inner(), 100, LoopTurns()), content, headers=PACKED)

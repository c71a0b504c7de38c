"""Gzipped bodies: what zlib unpacks, member by member."""

import asyncio
import gzip
import itertools
import zlib
from collections.abc import Iterator
from unittest.mock import patch

from smart_embedder.api.context import EMBEDDING_STREAM, NATIVE_EMBEDDINGS, RequestContext
from smart_embedder.engine.scheduling.fairness import LoopTurns
from smart_embedder.errors import BodyTooLargeError, InvalidRequestError
from smart_embedder.middleware import body as unpack_body
from smart_embedder.middleware.body import LimitBody
from tests.fuzzing.inputs import Target, check_sentence, cut, linear, outcome, read_input, seeds_of

_MOST_BYTES = 1 << 12
_MOST_EMPTY = 20
# So that some bytes are many parts.
_PIECE_BYTES = 128
_SMALL_PARTS = {
    "_PIECE_BYTES": _PIECE_BYTES,
    "_PACKED_BYTES_OF_A_TURN": 64,
    "_MEMBERS_OF_A_TURN": 4,
    "_FIRST_WINDOW": 8,
    "_LAST_WINDOW": 32,
    "_MOST_EMPTY_MEMBERS": _MOST_EMPTY,
}


def seeds() -> Iterator[bytes]:
    """One member, several, empty ones, cut ones, and those that hold much."""
    one, empty = gzip.compress(b"some text " * 9, mtime=0), gzip.compress(b"", mtime=0)
    named = b"\x1f\x8b\x08\x1c" + bytes(4) + b"\0\3\4\0abcdname\0note\0" + one[10:]
    stored = gzip.compress(bytes(range(200)), 0, mtime=0)
    large = gzip.compress(b"a" * 5_000, mtime=0)
    contents = [one, empty, one + empty + stored, named + one, one[:-3], one + b"\0\0", large]
    return seeds_of([*contents, one[:5] + empty * 3, empty * 30, b"", b"{}"])


def check(data: bytes) -> None:
    """What comes out is what zlib unpacks, or a refusal where it is none or too large."""
    chance, content = read_input(data)
    is_stream = chance.random() < 0.5
    pieces = cut(content, chance) or [b""]
    small_parts = patch.multiple(unpack_body, **_SMALL_PARTS)
    with small_parts, linear(content + bytes(4096), calls_per_byte=100):
        found, refused = outcome(
            lambda: asyncio.run(_unpack(pieces, is_stream=is_stream)),
            InvalidRequestError,
            BodyTooLargeError,
        )
    expected = unpack_plainly(content)
    is_large = expected is not None and max(len(content), len(expected[0])) > _MOST_BYTES
    if refused is None:
        assert expected is not None
        assert b"".join(found) == expected[0]
        assert all(0 < len(piece) <= _PIECE_BYTES for piece in found[:-1])
        assert is_stream or not is_large
        return
    check_sentence(refused)
    if isinstance(refused, InvalidRequestError):
        assert expected is None or expected[1] > _MOST_EMPTY, refused
    else:
        # It may be told before the end, where the rest is none.
        assert not is_stream
        assert expected is None or is_large, refused


def unpack_plainly(packed: bytes) -> tuple[bytes, int] | None:
    """The content, and the most empty members in a row; None where it is not gzip."""
    parts = []
    while packed or not parts:
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(packed))
        except zlib.error:
            return None
        if not member.eof:
            return None
        packed = member.unused_data
    empty = (len([*each]) for is_full, each in itertools.groupby(parts, bool) if not is_full)
    return b"".join(parts), max(empty, default=0)


async def _unpack(messages: list[bytes], *, is_stream: bool) -> list[bytes]:
    left, pieces = list(messages), []

    async def receive() -> dict:
        body = left.pop(0)
        context.bytes_in += len(body)  # As `ProvideContext` does.
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    async def read(_scope, receive, _send) -> None:
        more = True
        while more:
            message = await receive()
            pieces.append(message["body"])
            more = message["more_body"]

    endpoint = EMBEDDING_STREAM if is_stream else NATIVE_EMBEDDINGS
    context = RequestContext("id", "/", endpoint, "192.0.2.1")
    headers = [(b"content-encoding", b"gzip")]
    scope = {"type": "http", "state": {"context": context}, "headers": headers}
    await LimitBody(read, _MOST_BYTES, LoopTurns())(scope, receive, None)
    return pieces


TARGETS = {"gzip": Target(seeds, check, 1500)}

"""Unpacks bodies, and refuses one that is too large before it is read whole.

What is in a body, and how much memory all bodies hold together, is not known here.
"""

import math
import zlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smart_embedder.api.context import context_of, is_stream
from smart_embedder.api.errors import error_response
from smart_embedder.engine.scheduling.fairness import LoopTurns
from smart_embedder.errors import BodyTooLargeError, InvalidRequestError

_GZIP_WINDOW = 31
_PIECE_BYTES = 65_536
# What is unpacked in one turn: half a millisecond for a usual body, four for one that is made to
# take long, of blocks or members that hold nothing.
_PACKED_BYTES_OF_A_TURN = 32_768
_MEMBERS_OF_A_TURN = 256
# What is given to the unpacker at once, growing within a member: it copies what it leaves.
_FIRST_WINDOW, _LAST_WINDOW = 256, 16_384
_MOST_EMPTY_MEMBERS = 1000


class LimitBody:
    """Answers 413 as soon as a body is known to be larger than `max_bytes`, packed or unpacked.

    Unpacks a gzipped body and removes its Content-Encoding. Each piece is unpacked when the one
    before it has been received, so that a small body that unpacks to a large one is counted and
    refused as a large one. The body of a stream has no limit; its lines have.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, turns: LoopTurns) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the announced length, then count and unpack what arrives."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, context = MutableHeaders(scope=scope), context_of(scope)
        max_bytes = math.inf if is_stream(scope) else self._max_bytes
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > max_bytes:
            await error_response(scope, _too_large("body", max_bytes))(scope, receive, send)
            return

        async def receive_limited() -> Message:
            message = await receive()
            if context.bytes_in > max_bytes:
                raise _too_large("body", max_bytes)
            return message

        read = receive_limited
        if _is_gzipped(headers):
            del headers["content-encoding"]
            del headers["content-length"]
            read = _GzippedBody(receive_limited, max_bytes, self._turns, context.client).receive
        await self.app(scope, read, send)


def _too_large(what: str, max_bytes: float) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the {what} is larger than {max_bytes} bytes (MAX_BODY_BYTES): send fewer texts"
    )


def _is_gzipped(headers: Headers) -> bool:
    values = ",".join(headers.getlist("content-encoding")).lower().split(",")
    return [value.strip() for value in values if value.strip() not in {"", "identity"}] == ["gzip"]


class _GzippedBody:
    def __init__(self, receive: Receive, max_bytes: float, turns: LoopTurns, client: str) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._turns, self._client = turns, client
        # What has arrived, and how much of it the unpacker has taken.
        self._packed = b""
        self._taken = 0
        self._piece = b""
        self._size = 0
        self._more_packed = True
        # Whether the unpacker may hold more than it has given.
        self._more_inside = False
        self._ended = False
        self._empty_members = 0
        self._begin_member()

    def _begin_member(self) -> None:
        self._unpacker = zlib.decompressobj(wbits=_GZIP_WINDOW)
        self._window = _FIRST_WINDOW
        self._member_size = 0

    async def receive(self) -> Message:
        """The next piece; after the last one, the server's messages."""
        while True:
            if self._piece:
                piece, self._piece = self._piece, b""
                return {"type": "http.request", "body": piece, "more_body": True}
            if self._more_inside or self._taken < len(self._packed):
                # Kept, because the end of a turn can be cancelled, and `receive` called again.
                async with self._turns.turn(self._client):
                    self._piece = self._unpack()
            elif self._more_packed:
                message = await self._receive()
                if message["type"] != "http.request":
                    return message
                self._packed, self._taken = message.get("body", b""), 0
                self._more_packed = message.get("more_body", False)
            else:
                return await self._end()

    def _unpack(self) -> bytes:
        """What one turn unpacks: a piece, part of one, or nothing."""
        piece = bytearray()
        last = min(self._taken + _PACKED_BYTES_OF_A_TURN, len(self._packed))
        members = 0
        while len(piece) < _PIECE_BYTES and members < _MEMBERS_OF_A_TURN:
            if not (self._more_inside or self._taken < last):
                break
            if self._unpacker.eof:  # A file of gzip may have several members.
                self._begin_member()
            piece += self._unpack_window(_PIECE_BYTES - len(piece))
            if self._unpacker.eof:
                members += 1
                self._end_member()
        self._size += len(piece)
        if self._size > self._max_bytes:
            raise _too_large("unpacked body", self._max_bytes)
        return bytes(piece)

    def _unpack_window(self, most: int) -> bytes:
        window = self._packed[self._taken : self._taken + self._window]
        try:
            unpacked = self._unpacker.decompress(window, most)
        except zlib.error as error:
            raise _not_gzip(str(error)) from None
        left = len(self._unpacker.unused_data) or len(self._unpacker.unconsumed_tail)
        self._taken += len(window) - left
        self._window = min(2 * self._window, _LAST_WINDOW)
        self._member_size += len(unpacked)
        self._more_inside = len(unpacked) == most and not self._unpacker.eof
        return unpacked

    def _end_member(self) -> None:
        """Count it; a body of empty members would take time and never bring anything."""
        self._empty_members = 0 if self._member_size else self._empty_members + 1
        if self._empty_members > _MOST_EMPTY_MEMBERS:
            raise _not_gzip(f"more than {_MOST_EMPTY_MEMBERS} of its members in a row are empty")

    async def _end(self) -> Message:
        if self._ended:
            return await self._receive()
        self._ended = True
        if not self._unpacker.eof:
            raise _not_gzip("it ends too early")
        return {"type": "http.request", "body": b"", "more_body": False}


def _not_gzip(reason: str) -> InvalidRequestError:
    message = f"the body cannot be unpacked as Content-Encoding: gzip says ({reason})"
    return InvalidRequestError(message, [{"pointer": "", "message": message}])

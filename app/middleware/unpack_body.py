"""Unpacks gzipped bodies in small pieces, up to the limit of a body."""

import asyncio
import math
import zlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.context import is_stream
from app.errors import BodyTooLargeError, InvalidRequestError

_PIECE_BYTES = 65_536
_GZIP_WINDOW = 31


class UnpackBody:
    """Unpacks a gzipped body to at most `max_bytes` and removes its Content-Encoding.

    The body of a stream has no limit. Each piece is unpacked when the one before it has been
    received, so that a small body that unpacks to a large one is counted and refused as a large
    one.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Unpack the body as it is read, if it says that it is gzipped."""
        if scope["type"] == "http" and _is_gzipped(Headers(scope=scope)):
            headers = MutableHeaders(scope=scope)
            del headers["content-encoding"]
            del headers["content-length"]
            max_bytes = math.inf if is_stream(scope) else self._max_bytes
            receive = _GzippedBody(receive, max_bytes).receive
        await self.app(scope, receive, send)


def _is_gzipped(headers: Headers) -> bool:
    values = ",".join(headers.getlist("content-encoding")).lower().split(",")
    return [value.strip() for value in values if value.strip() not in {"", "identity"}] == ["gzip"]


class _GzippedBody:
    def __init__(self, receive: Receive, max_bytes: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._unpacker = zlib.decompressobj(wbits=_GZIP_WINDOW)
        self._packed = b""
        self._size = self._packed_size = 0
        self._more_packed = True
        # Whether the unpacker may hold more than it has given.
        self._more_inside = False
        self._ended = False

    async def receive(self) -> Message:
        """The next piece; after the last one, the server's messages."""
        while self._more_packed or self._packed or self._more_inside:
            if self._packed or self._more_inside:
                piece = self._unpack()
                if piece:
                    await asyncio.sleep(0)  # Others run between the pieces of one message.
                    return {"type": "http.request", "body": piece, "more_body": True}
                continue
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._packed = message.get("body", b"")
            self._packed_size += len(self._packed)
            if self._packed_size > self._max_bytes:
                raise self._too_large()
            self._more_packed = message.get("more_body", False)
            if not (self._more_packed or self._packed):
                break
        return await self._end()

    def _unpack(self) -> bytes:
        if self._unpacker.eof:  # A file of gzip may have several members.
            self._unpacker = zlib.decompressobj(wbits=_GZIP_WINDOW)
        try:
            piece = self._unpacker.decompress(self._packed, _PIECE_BYTES)
        except zlib.error as error:
            raise _not_gzip(str(error)) from None
        self._packed = self._unpacker.unused_data or self._unpacker.unconsumed_tail
        self._more_inside = len(piece) == _PIECE_BYTES and not self._unpacker.eof
        self._size += len(piece)
        if self._size > self._max_bytes:
            raise self._too_large()
        return piece

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the unpacked body is larger than {self._max_bytes} bytes (MAX_BODY_BYTES): send "
            "fewer texts"
        )

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

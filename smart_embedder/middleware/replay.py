"""Logs answered requests so that they can be repeated; in the app only where REPLAY_LOG is set.

It is the one place where texts are written. Of the headers it has those that change an answer, and
so no token; a body that repeats the request's own token is left out. Streams are not logged.
"""

import os
import queue
import stat
import threading
from binascii import b2a_base64
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import Any

import orjson
import structlog
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smart_embedder import __version__
from smart_embedder.api.context import context_of, is_stream, working_endpoint
from smart_embedder.api.rendering import compress, text_as_json
from smart_embedder.errors import StartupError

log = structlog.get_logger(__name__)

_HEADERS = ("accept", "content-type", "if-vector-space")
# Of one request, so that making its line does not hold Python's lock for long.
_MOST_BODY_BYTES = 4 << 20
_MOST_ANSWER_BYTES = 16 << 20
# Of all that are in work or wait for the disk.
_MOST_HELD_BYTES = 64 << 20
_CLOSE_SECONDS = 5.0
# A shorter one, such as `none`, may stand in any text.
_LEAST_TOKEN = 8


class ReplayLog:
    """A file of lines of JSON, written by a thread of its own, which nobody waits for.

    Before a line that would make it larger than `max_bytes`, the file gets the name with `.1` at
    its end, in place of an older one. What is not written is counted in `left_out`, by reason: size
    of one body or answer, memory of all that wait, disk, or a token in the body.
    """

    def __init__(self, path: Path, max_bytes: int, left_out: Counter) -> None:
        self._path, self._max_bytes, self._left_out = path, max_bytes, left_out
        self._held, self._lock = 0, threading.Lock()
        self._failing = False
        try:
            self._open()
        except OSError as error:
            raise StartupError(f"REPLAY_LOG={path} cannot be written: {error.strerror}") from None
        self._entries: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        # A daemon, as a disk that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name="replay-log", daemon=True)
        self._thread.start()

    def hold(self, size: int) -> bool:
        """Hold so many bytes more, if they are not too many; fewer, if `size` is negative."""
        with self._lock:
            if size > 0 and self._held + size > _MOST_HELD_BYTES:
                return False
            self._held += size
            return True

    def write(self, entry: "Entry") -> None:
        """Write it soon, and hold its parts no longer."""
        self._entries.put(entry)

    def close(self) -> None:
        """Write what waits, for some seconds at most; blocks."""
        self._entries.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("replay_log_not_written", reason="the disk is too slow for what waits")

    def _open(self) -> None:
        if self._path.exists() and not stat.S_ISREG(self._path.stat().st_mode):
            raise OSError(0, "it is no file")
        self._file = FileIO(self._path, "ab", opener=partial(os.open, mode=0o600))
        self._path.chmod(0o600)
        self._size = self._path.stat().st_size
        if self._size:  # A process that was killed may have left half a line.
            self._append([b"\n"])

    def _run(self) -> None:
        while (entry := self._entries.get()) is not None:
            try:
                self._write(entry)
            except (OSError, ValueError) as error:
                self._left_out.labels("disk").inc()
                if not self._failing:
                    log.warning("replay_log_not_written", reason=str(error))
                self._failing = True
            else:
                self._failing = False
            entry.release()
        self._file.close()

    def _write(self, entry: "Entry") -> None:
        """Write its line; raises `OSError`, and then nothing of it is in the file."""
        line = list(entry.line())
        size, reasons = sum(map(len, line)), [*entry.left_out.values()]
        if size > self._max_bytes:
            line, size, reasons = [], 0, ["size"]
        for reason in reasons:
            self._left_out.labels(reason).inc()
        if self._size + size > self._max_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        if self._file.closed:
            self._open()
        self._append(line)

    def _append(self, pieces: Iterable[bytes]) -> None:
        size = self._size
        try:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[self._file.write(left) :]
                size += len(piece)
        except OSError:
            with suppress(OSError):  # What was written of it.
                self._file.truncate(self._size)
            raise
        self._size = size


@dataclass(slots=True)
class Part:
    """A body or an answer, in the pieces in which it passes; where it is left out, it is None."""

    replay_log: ReplayLog
    most: int
    pieces: list[bytes] | None = field(default_factory=list)
    size: int = 0
    left_out: str | None = None

    def add(self, piece: bytes | memoryview) -> None:
        """Keep the piece, unless the whole becomes too large."""
        if self.pieces is None:
            return
        if self.size + len(piece) > self.most:
            self.leave_out("size")
        elif not self.replay_log.hold(len(piece)):
            self.leave_out("memory")
        else:
            # A copy of a view, which would keep the vectors of other requests.
            self.pieces.append(bytes(piece))
            self.size += len(piece)

    def leave_out(self, reason: str) -> None:
        """Keep nothing of it, and the reason."""
        self.release()
        self.left_out = reason

    def release(self) -> None:
        """Keep nothing of it."""
        self.replay_log.hold(-self.size)
        self.pieces, self.size = None, 0


@dataclass(slots=True)
class Entry:
    """A request and its answer; `facts` are the fields of its line beside both."""

    body: Part
    answer: Part
    token: bytes
    facts: dict[str, Any] = field(default_factory=dict)
    content_type: str = ""
    encoding: str = ""

    @property
    def left_out(self) -> dict[str, str]:
        """Why a part is left out."""
        parts = {"body": self.body.left_out, "answer": self.answer.left_out}
        return {name: reason for name, reason in parts.items() if reason is not None}

    def release(self) -> None:
        """Keep nothing of it."""
        self.body.release()
        self.answer.release()

    def line(self) -> Iterator[bytes]:
        """The pieces of its line; the answer is compressed if it was not, and then in base64."""
        body = None if self.body.pieces is None else b"".join(self.body.pieces)
        if body is not None and len(self.token) >= _LEAST_TOKEN and self.token in body:
            self.body.leave_out("token")
            body = None
        asked = None if body is None else text_as_json(body.decode())
        yield orjson.dumps(self.facts | {"left_out": self.left_out, "body": asked})[:-1]
        if self.answer.pieces is None:
            yield b',"answer":null}\n'
            return
        about = {"type": self.content_type, "encoding": self.encoding or "gzip"}
        yield b',"answer":' + orjson.dumps(about)[:-1] + b',"data":["'
        packed: Iterable[bytes] = self.answer.pieces
        if not self.encoding:
            packed = compress(packed, "gzip")
        for piece in packed:
            yield b2a_base64(piece, newline=False) + b'","'
        yield b'"]}}\n'


class LogForReplay:
    """Logs each request that was answered with vectors or scores, once its client has all of it."""

    def __init__(self, app: ASGIApp, replay_log: ReplayLog) -> None:
        self.app = app
        self._log = replay_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the body as it is read, and at the answer as it is sent."""
        if working_endpoint(scope) is None or is_stream(scope):
            await self.app(scope, receive, send)
            return
        context, headers = context_of(scope), Headers(scope=scope)
        kept = {name: ", ".join(headers.getlist(name)) for name in _HEADERS if name in headers}
        entry = Entry(
            Part(self._log, _MOST_BODY_BYTES),
            Part(self._log, _MOST_ANSWER_BYTES),
            headers.get("authorization", "").encode("latin-1").rpartition(b" ")[2],
            {"request_id": context.request_id, "time": datetime.now(UTC).isoformat()},
        )
        has_left = scope["state"].get("is_closing", bool)
        answered = False

        async def receive_and_keep() -> Message:
            message = await receive()
            entry.body.add(message.get("body", b""))
            return message

        async def send_and_keep(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                about = Headers(raw=message["headers"])
                entry.content_type = about.get("content-type", "")
                entry.encoding = about.get("content-encoding", "")
            elif context.status == HTTPStatus.OK and context.vector_spaces:
                entry.answer.add(message.get("body", b""))
                # Where the client has left, it is cut off.
                answered = not message.get("more_body", False) and not has_left()
            await send(message)

        try:
            await self.app(scope, receive_and_keep, send_and_keep)
        finally:
            if answered:
                entry.facts |= {
                    "path": context.route,
                    "headers": kept,
                    "status": context.status,
                    "version": __version__,
                    "vector_space": context.vector_spaces,
                    "precision": context.precisions,
                }
                self._log.write(entry)
            else:
                entry.release()

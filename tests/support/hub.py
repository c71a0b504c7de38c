"""A model hub on loopback that serves one model, for tests of downloads."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.answering_http import Handler, serving, url_of

MODEL = "example/m3"
_COMMIT = "a" * 40
_LIMIT = 500


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder as the model `example/m3`.

    While `flowing` is not set, a file stops after `stop_at` bytes; for the first `cuts` such files
    the connection is cut there instead. With a `token` the model is gated. Used as a proxy, it
    serves the model for every hub, and records the hub in `hosts`. `tags` are the ETags of files
    by name; the default is the name itself.
    """

    def __init__(self, folder: Path, *, stop_at: int, cuts: int, token: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.stop_at = stop_at
        self.cuts = cuts
        self.token = token
        self.tags: dict[str, str] = {}
        self.hosts: set[str] = set()
        self.flowing = threading.Event()
        self.flowing.set()
        self.ranges: list[str] = []

    @property
    def address(self) -> str:
        return url_of(self)

    @property
    def sizes(self) -> dict[str, int]:
        files = sorted(file for file in self.folder.rglob("*") if file.is_file())
        return {file.relative_to(self.folder).as_posix(): file.stat().st_size for file in files}


class _Handler(Handler):
    server: Hub

    def respond(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.hosts.add(urlsplit(self.path).netloc)
        token = self.server.token
        if token and self.headers.get("Authorization") != f"Bearer {token}":
            self.answer(403, X_Error_Code="GatedRepo")
        elif "/resolve/" in path:
            file = path.partition("/resolve/")[2].partition("/")[2]
            self._send_file(self.server.folder / file)
        elif "/tree/" in path:
            files = self.server.sizes.items()
            self._send_json(
                [{"type": "file", "path": name, "oid": name, "size": size} for name, size in files]
            )
        else:
            files = self.server.sizes.items()
            siblings = [{"rfilename": name, "size": size} for name, size in files]
            self._send_json({"id": MODEL, "sha": _COMMIT, "siblings": siblings})

    def _send_json(self, content: object) -> None:
        self.answer(200, json.dumps(content).encode(), ETag='"answer"', X_Repo_Commit=_COMMIT)

    def _send_file(self, file: Path) -> None:
        requested = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(requested[1]) if requested else 0
        body = file.read_bytes()[start:]
        tag = self.server.tags.get(file.name, file.name)
        status = 206 if requested else 200
        self.send_head(status, len(body), ETag=f'"{tag}"', X_Repo_Commit=_COMMIT)
        if self.command == "GET":
            if requested:
                self.server.ranges.append(requested[0])
            self._send_body(body)

    def _send_body(self, body: bytes) -> None:
        stop = self.server.stop_at
        self.wfile.write(body[:stop])
        if len(body) > stop:
            self.wfile.flush()
            if self.server.cuts:
                self.server.cuts -= 1
                return
            self.server.flowing.wait(_LIMIT)
            self.wfile.write(body[stop:])


@contextmanager
def run_hub(
    folder: Path, *, stop_at: int = 2**40, cuts: int = 0, token: str | None = None
) -> Iterator[Hub]:
    """Serve a folder until the block ends."""
    with serving(Hub(folder, stop_at=stop_at, cuts=cuts, token=token)) as hub:
        try:
            yield hub
        finally:
            hub.flowing.set()

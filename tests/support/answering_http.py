"""HTTP servers in threads of the test's process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from typing import Any, TypeVar

Server = TypeVar("Server", bound=BaseServer)


class Handler(BaseHTTPRequestHandler):
    """Responds to every method by `respond`, and logs nothing."""

    def respond(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.respond()

    do_POST = do_HEAD = do_GET  # noqa: N815 - the library's names

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def send_head(self, status: int, length: int, **headers: str) -> None:
        """Send status and headers; a `_` in the name of a header stands for a hyphen."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_head(status, len(body), **headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve in a thread until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering(answers: dict[str, Any]) -> Iterator[str]:
    """Serve JSON, or a status, by path, and 404 elsewhere; yields the address."""

    class Answers(Handler):
        def respond(self) -> None:
            self.read_body()
            answer = answers.get(self.path, 404)
            is_status = isinstance(answer, int)
            self.answer(*(answer, b"no") if is_status else (200, json.dumps(answer).encode()))

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Answers)) as server:
        yield url_of(server)

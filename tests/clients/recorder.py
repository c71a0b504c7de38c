"""A proxy between a client and a server that records what is sent."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2

RECORDED = Path(__file__).parent / "recorded.jsonl"
# What decides how the server reads a request. The rest is the connection's, or of one run alone.
_RECORDED = {"content-type", "content-encoding", "accept", "accept-encoding"}
_OF_A_CONNECTION = {"content-length", "connection", "transfer-encoding", "date", "server"}


class Recorder(ThreadingHTTPServer):
    """Forwards to `target`; `requests` holds what came. `prepare` is called before the first."""

    daemon_threads = True

    def __init__(self, target: str, prepare: Callable[[], None] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.client = httpx2.Client(base_url=target, timeout=60)
        self.requests: list[dict] = []
        self.prepare = prepare

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(
            {
                "method": self.command,
                "path": self.path,
                "headers": {
                    k.lower(): v for k, v in self.headers.items() if k.lower() in _RECORDED
                },
                "body": body.decode(),
            }
        )
        if self.server.prepare and len(self.server.requests) == 1:
            self.server.prepare()
        headers = {k: v for k, v in self.headers.items() if k.lower() != "host"}
        answer = self.server.client.request(
            self.command, self.path, content=body, headers=headers | {"accept-encoding": "identity"}
        )
        self._answer(answer.status_code, dict(answer.headers), answer.content)

    do_GET = do_POST  # noqa: N815 - the library's name

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _OF_A_CONNECTION:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def recorder(target: str, prepare: Callable[[], None] | None = None) -> Iterator[Recorder]:
    proxy = Recorder(target, prepare)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
        proxy.client.close()


def stem(name: str) -> str:
    """What a client is called where its request is stored."""
    return re.sub("[^a-z0-9]+", "-", name.lower())


def requests_in(file: Path) -> dict[str, dict]:
    """The stored requests, by their clients."""
    return {each.pop("client"): each for each in map(json.loads, file.read_text().splitlines())}


def record(name: str, request: dict) -> None:
    """Store it for test_recorded.py."""
    stored = requests_in(RECORDED) | {stem(name): request}
    lines = [json.dumps({"client": k} | stored[k], ensure_ascii=False) for k in sorted(stored)]
    RECORDED.write_text("\n".join(lines) + "\n")

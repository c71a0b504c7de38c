"""A proxy between a client and a server that records requests."""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx2

from tests.support.answering_http import Handler, serving, url_of
from tests.support.formats import MESSAGE_PACK
from tests.support.waiting import LIMIT

RECORDED = Path(__file__).parent / "recorded.jsonl"
# The headers that affect how the server reads a request.
_RECORDED = {"content-type", "content-encoding", "accept", "accept-encoding"}
_NOT_FORWARDED = {"host", "content-length", "connection", "transfer-encoding", "date", "server"}


class Recorder(ThreadingHTTPServer):
    """Forwards to `target`; `requests` holds what came; `prepare` is called before the first."""

    daemon_threads = True

    def __init__(self, target: str, prepare: Callable[[], None] | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.client = httpx2.Client(base_url=target, timeout=LIMIT)
        self.requests: list[dict] = []
        self.prepare = prepare

    @property
    def url(self) -> str:
        return url_of(self)


class _Handler(Handler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def respond(self) -> None:
        body = self.read_body()
        self.server.requests.append(
            {
                "method": self.command,
                "path": self.path,
                "headers": {
                    k.lower(): v for k, v in self.headers.items() if k.lower() in _RECORDED
                },
                "body": as_text(body, self.headers["content-type"]),
            }
        )
        if self.server.prepare and len(self.server.requests) == 1:
            self.server.prepare()
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _NOT_FORWARDED}
        answer = self.server.client.request(
            self.command, self.path, content=body, headers=headers | {"accept-encoding": "identity"}
        )
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in _NOT_FORWARDED}
        self.answer(answer.status_code, answer.content, **kept)


@contextmanager
def recorder(target: str, prepare: Callable[[], None] | None = None) -> Iterator[Recorder]:
    with serving(Recorder(target, prepare)) as proxy, proxy.client:
        yield proxy


def as_text(body: bytes, content_type: str | None) -> str:
    """Return a body for a file of JSON: MessagePack in base64, others as they are."""
    return b64encode(body).decode() if content_type == MESSAGE_PACK else body.decode()


def as_bytes(request: dict) -> bytes:
    """Return the body of a stored request."""
    is_packed = request["headers"].get("content-type") == MESSAGE_PACK
    return b64decode(request["body"]) if is_packed else request["body"].encode()


def stem(name: str) -> str:
    """Return the name under which a client's request is stored."""
    return re.sub("[^a-z0-9]+", "-", name.lower())


def read_requests(file: Path) -> dict[str, dict]:
    """Read the stored requests, by client."""
    return {
        request.pop("client"): request for request in map(json.loads, file.read_text().splitlines())
    }


def record(name: str, request: dict) -> None:
    """Store a request for test_recorded.py."""
    stored = read_requests(RECORDED) | {stem(name): request}
    lines = [json.dumps({"client": k} | stored[k], ensure_ascii=False) for k in sorted(stored)]
    RECORDED.write_text("\n".join(lines) + "\n")

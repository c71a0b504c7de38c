"""A client of /embeddings/stream that sends and reads as a test says, in any order."""

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlencode

from tests.support.server import RunningServer

NDJSON = "application/x-ndjson"


class Stream:
    """One stream; `send` does not read and `record` does not send."""

    def __init__(
        self,
        server: RunningServer,
        options: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        receive_buffer: int | None = None,
    ) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=60)
        if receive_buffer is not None:
            self._connect_with(receive_buffer)
        path = "/embeddings/stream?" + urlencode({"return_colbert": "false", **(options or {})})
        self.connection.putrequest("POST", path)
        for name, value in ({"Content-Type": NDJSON} | dict(headers or {})).items():
            self.connection.putheader(name, value)
        self.connection.putheader("Transfer-Encoding", "chunked")
        self.connection.endheaders()
        self._response: http.client.HTTPResponse | None = None

    def _connect_with(self, receive_buffer: int) -> None:
        """A small buffer lets the server feel at once that nobody reads."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(60)
        raw.connect((self.connection.host, self.connection.port))
        self.connection.sock = raw

    def send(self, content: bytes) -> None:
        self.connection.send(b"%x\r\n%b\r\n" % (len(content), content))

    def send_texts(self, *texts: str) -> None:
        self.send(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))

    def end(self) -> None:
        self.connection.send(b"0\r\n\r\n")

    @property
    def response(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self.connection.getresponse()
        return self._response

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.response.readline())
        return record

    def rest(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.response.read().splitlines()]

    def hang_up(self) -> None:
        """End a `send` that waits: while it does, the system keeps the connection open."""
        self.connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

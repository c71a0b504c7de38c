"""A model hub on loopback that knows one model, for what only happens during a download."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_COMMIT = "a" * 40
_CONFIG = b"{}"


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = self._body()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", _COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - http.server's own names

    def _body(self) -> bytes:
        if "/resolve/" in self.path:
            return _CONFIG
        if "/tree/" in self.path:
            file = {"type": "file", "path": "config.json", "oid": "1", "size": len(_CONFIG)}
            return json.dumps([file]).encode()
        model = {"id": "example/m3", "sha": _COMMIT, "siblings": [{"rfilename": "config.json"}]}
        return json.dumps(model).encode()

    def log_message(self, *_: object) -> None:
        """Keep silent."""


@contextmanager
def run_hub() -> Iterator[str]:
    """Serve the hub; give its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()

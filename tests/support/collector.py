"""A real OTLP receiver over HTTP for tests, on a free loopback port."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_LIMIT = 120.0


class Collector:
    """Keeps every span, and the bytes, that arrived."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        self.services: set[str] = set()
        self.paths: set[str] = set()
        self.url = ""
        self._changed = threading.Condition()

    def take(self, path: str, body: bytes) -> None:
        export = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.paths.add(path)
            self.raw += body
            for resource in export.resource_spans:
                names = {item.key: item.value for item in resource.resource.attributes}
                self.services.add(names["service.name"].string_value)
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Span]:
        """Every span so far, once there are `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spans) >= count, WAIT_LIMIT), self.spans
            return list(self.spans)


@contextmanager
def run_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()

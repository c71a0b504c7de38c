"""An OTLP receiver over HTTP, on a free loopback port."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.answering_http import Handler, serving, url_of

WAIT_LIMIT = 500.0


class Collector:
    """Keeps the spans, and the bytes, that arrived."""

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
        """Wait for `count` spans, and return all so far."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spans) >= count, WAIT_LIMIT), self.spans
            return list(self.spans)


@contextmanager
def run_collector() -> Iterator[Collector]:
    collector = Collector()

    class Receiver(Handler):
        def respond(self) -> None:
            collector.take(self.path, self.read_body())
            answer = ExportTraceServiceResponse().SerializeToString()
            self.answer(200, answer, Content_Type="application/x-protobuf")

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Receiver)) as server:
        collector.url = url_of(server)
        yield collector

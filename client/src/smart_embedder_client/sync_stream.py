"""A stream of texts, for threads."""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import httpx

from smart_embedder_client.bodies import chunks_of, read_body
from smart_embedder_client.calls import Service, StreamOptions
from smart_embedder_client.errors import SmartEmbedderError, transport_errors
from smart_embedder_client.limits import SMALL
from smart_embedder_client.records import StreamedText
from smart_embedder_client.sections import (
    OPEN_SECTIONS,
    POOL_SECONDS,
    Section,
    SectionMaker,
    TextOrPair,
)


@dataclass(frozen=True, slots=True)
class SyncStream:
    """Sends texts in sections and reads their records, in order."""

    http: httpx.Client
    service: Service
    options: StreamOptions

    def run(self, texts: Iterable[TextOrPair]) -> Generator[StreamedText]:
        """The records; a few sections are with the service at a time."""
        maker, source = SectionMaker(self.options.options), iter(texts)
        waiting: deque[tuple[Section, httpx.Response | None]] = deque()
        try:
            while True:
                while len(waiting) < OPEN_SECTIONS and (section := _next(maker, source)):
                    waiting.append((section, self._open_early(section)))
                if not waiting:
                    return
                yield from self._records(*waiting.popleft())
                maker.size.record_end()
        finally:
            for _, response in waiting:
                if response is not None:
                    response.close()

    def _open_early(self, section: Section) -> httpx.Response | None:
        """Send a section early; None if that fails: `_records` sends it again."""
        try:
            return self._open(section, pool=POOL_SECONDS)
        except SmartEmbedderError:
            return None

    def _open(self, section: Section, pool: float | None = None) -> httpx.Response:
        request = self.http.build_request(
            **self.service.stream_request(section.body, self.options, pool=pool)
        )
        with transport_errors(self.http, self.service.url):
            response = self.http.send(request, stream=True)
            try:
                is_stream = response.status_code == httpx.codes.OK
                section.begin(response if is_stream else read_body(response, SMALL))
            except BaseException:
                response.close()
                raise
        return response

    def _records(
        self, section: Section, response: httpx.Response | None
    ) -> Generator[StreamedText]:
        """The records of one section, which is sent again if its answer ends too early."""
        retries = self.service.retries(resumes=True)
        while True:
            before = section.answered
            try:
                response = response or self._open(section)
                with closing(response), transport_errors(self.http, self.service.url):
                    for chunk in chunks_of(response):
                        yield from section.read(response, chunk)
                section.end()
            except SmartEmbedderError as error:
                if section.answered > before:
                    retries = self.service.retries(resumes=True)
                pause = retries.pause_after(error)
            else:
                return
            response = None
            time.sleep(pause)


def _next(maker: SectionMaker, source: Iterator[TextOrPair]) -> Section | None:
    for given in source:
        maker.add(given)
        if maker.full:
            break
    return maker.take()

"""A stream of texts, for asyncio."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass

import httpx

from smart_embedder_client.bodies import chunks_of_async, read_body_async
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
class AsyncStream:
    """Sends texts in sections and reads their records, in order."""

    http: httpx.AsyncClient
    service: Service
    options: StreamOptions

    async def run(
        self, texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair]
    ) -> AsyncGenerator[StreamedText]:
        """The records; a few sections are with the service at a time."""
        maker, source = SectionMaker(self.options.options), _iterate(texts)
        waiting: deque[tuple[Section, httpx.Response | None]] = deque()
        try:
            while True:
                while len(waiting) < OPEN_SECTIONS and (section := await _next(maker, source)):
                    waiting.append((section, await self._open_early(section)))
                if not waiting:
                    return
                async with aclosing(self._records(*waiting.popleft())) as records:
                    async for record in records:
                        yield record
                maker.size.record_end()
        finally:
            for _, response in waiting:
                if response is not None:
                    await response.aclose()

    async def _open_early(self, section: Section) -> httpx.Response | None:
        """Send a section early; None if that fails: `_records` sends it again."""
        try:
            return await self._open(section, pool=POOL_SECONDS)
        except SmartEmbedderError:
            return None

    async def _open(self, section: Section, pool: float | None = None) -> httpx.Response:
        request = self.http.build_request(
            **self.service.stream_request(section.body, self.options, pool=pool)
        )
        with transport_errors(self.http, self.service.url):
            response = await self.http.send(request, stream=True)
            try:
                is_stream = response.status_code == httpx.codes.OK
                section.begin(response if is_stream else await read_body_async(response, SMALL))
            except BaseException:
                await response.aclose()
                raise
        return response

    async def _records(
        self, section: Section, response: httpx.Response | None
    ) -> AsyncGenerator[StreamedText]:
        """The records of one section, which is sent again if its answer ends too early."""
        retries = self.service.retries(resumes=True)
        while True:
            before = section.answered
            try:
                response = response or await self._open(section)
                with transport_errors(self.http, self.service.url):
                    async for chunk in chunks_of_async(response):
                        for record in section.read(response, chunk):
                            yield record
                section.end()
            except SmartEmbedderError as error:
                if section.answered > before:
                    retries = self.service.retries(resumes=True)
                pause = retries.pause_after(error)
            else:
                return
            finally:
                if response is not None:
                    await response.aclose()
            response = None
            await asyncio.sleep(pause)


async def _iterate(
    texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair],
) -> AsyncIterator[TextOrPair]:
    if isinstance(texts, AsyncIterable):
        async for given in texts:
            yield given
    else:
        for given in texts:
            yield given


async def _next(maker: SectionMaker, source: AsyncIterator[TextOrPair]) -> Section | None:
    async for given in source:
        maker.add(given)
        if maker.full:
            break
    return maker.take()

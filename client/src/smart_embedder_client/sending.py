"""How both clients send requests: written once, over connections of threads or of asyncio.

Over those of threads a coroutine never waits for an event loop: `finished` and `iterate` run it.
"""

import asyncio
import sys
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import httpx

from smart_embedder_client.answers import Embeddings, join_embeddings
from smart_embedder_client.calls import Answer, Call, Retries, Service, embed_calls
from smart_embedder_client.errors import SmartEmbedderError, transport_errors, unexpected_answer
from smart_embedder_client.limits import SMALL, Limits

Result = TypeVar("Result")
# While one page of a stream is computed, the others wait in the service.
OPEN_PAGES = 3


@dataclass(frozen=True, slots=True)
class ThreadHttp:
    """What of httpx differs between threads and asyncio; here each method blocks its thread."""

    client: httpx.Client
    threads: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, OPEN_PAGES))

    async def send(self, request: httpx.Request) -> httpx.Response:
        """The beginning of an answer."""
        return self.client.send(request, stream=True)

    async def read(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """Its body as it arrives."""
        for chunk in response.iter_raw():
            yield chunk

    async def end(self, response: httpx.Response) -> None:
        """Let go of its connection."""
        response.close()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs it

    def start(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """Begin a page of a stream."""
        return self.threads.submit(lambda: finished(work()))

    async def result(self, page: Future[Result]) -> Result:
        """Wait for the page."""
        return page.result()

    async def cancel(self, pages: Iterable[Future[Any]]) -> None:
        """Drop the pages that have not begun; the others end by themselves."""
        for page in pages:
            page.cancel()


@dataclass(frozen=True, slots=True)
class AsyncioHttp:
    """The same where each method waits in the event loop."""

    client: httpx.AsyncClient

    async def send(self, request: httpx.Request) -> httpx.Response:
        """The beginning of an answer."""
        return await self.client.send(request, stream=True)

    def read(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """Its body as it arrives."""
        return response.aiter_raw()

    async def end(self, response: httpx.Response) -> None:
        """Let go of its connection."""
        await response.aclose()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    def start(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> asyncio.Task[Result]:
        """Begin a page of a stream."""
        return asyncio.create_task(work())

    async def result(self, page: asyncio.Task[Result]) -> Result:
        """Wait for the page."""
        return await page

    async def cancel(self, pages: Iterable[asyncio.Task[Any]]) -> None:
        """Cancel the pages, which takes their requests out of the service's queue."""
        for page in pages:
            page.cancel()
        await asyncio.gather(*pages, return_exceptions=True)


Http = ThreadHttp | AsyncioHttp


def finished(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine over `ThreadHttp`."""
    # An event loop of this thread would close the generators in it at its own end.
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        sys.set_asyncgen_hooks(*hooks)
    raise RuntimeError("what runs in a thread has waited for an event loop")


def iterate(records: AsyncGenerator[Result]) -> Generator[Result]:
    """The items of a generator over `ThreadHttp`, which ends with this one."""
    try:
        while True:
            try:
                record = finished(_next(records))
            except StopAsyncIteration:
                return
            yield record
    finally:
        finished(records.aclose())


async def _next(records: AsyncGenerator[Result]) -> Result:
    return await anext(records)


async def chunks_of(http: Http, response: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it arrives; all of it if a hook of the caller's has read it already.

    Raises `SmartEmbedderError` if it is compressed, which nobody asked for and which hides its
    size.
    """
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise unexpected_answer(response, f"the answer is compressed ({encoding})")
    if response.is_stream_consumed:
        yield response.content
        return
    async for chunk in http.read(response):
        yield chunk


async def read_body(http: Http, response: httpx.Response, limits: Limits) -> httpx.Response:
    """The same response with its body; raises `SmartEmbedderError` if it is too long."""
    # A refusal is no larger, whatever was asked for.
    most = (limits if response.status_code == httpx.codes.OK else SMALL).bytes
    content = bytearray()
    async for chunk in chunks_of(http, response):
        content += chunk
        if len(content) > most:
            what = f"the answer has more than the {most} bytes that it may have"
            raise unexpected_answer(response, what)
    status, headers, request = response.status_code, response.headers, response.request
    return httpx.Response(status, headers=headers, content=bytes(content), request=request)


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends requests to one service."""

    http: Http
    service: Service

    async def embed(
        self,
        texts: Sequence[str],
        options: Mapping[str, Any],
        priority: int | None,
        *,
        resumes: bool = False,
    ) -> Embeddings:
        """The vectors of all texts, which may take several requests."""
        sizes, parts = [], []
        for size, call in embed_calls(texts, options, priority):
            parts.append(await self.send(call, resumes=resumes))
            sizes.append(size)
        return join_embeddings(parts, sizes)

    async def send(self, call: Call[Answer], *, resumes: bool = False) -> Answer:
        """The answer, with other tries where they make sense; see `Retries`."""
        retries = Retries(self.service.max_retries, self.service.max_wait, resumes)
        while True:
            try:
                return await self.send_once(call)
            except SmartEmbedderError as error:
                pause = retries.pause_after(error)
            await self.http.sleep(pause)

    async def send_once(self, call: Call[Answer]) -> Answer:
        """The answer to one try."""
        request = self.http.client.build_request(**self.service.request(call))
        with transport_errors(self.http.client, self.service.url):
            response = await self.http.send(request)
            try:
                answer = await read_body(self.http, response, call.limits)
            finally:
                await self.http.end(response)
        return call.read(answer)

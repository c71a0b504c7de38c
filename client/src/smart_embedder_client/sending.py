"""Send requests: one implementation for both clients, over connections of threads or of asyncio.

Over those of threads a coroutine never waits for an event loop: `run` and `iterate` run it.
"""

import asyncio
import sys
import time
from collections.abc import (
    AsyncGenerator,
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
from typing import Any

import httpx

from smart_embedder_client.answers import Embeddings, join_embeddings
from smart_embedder_client.calls import Call, Result, Retries, Service, embed_calls
from smart_embedder_client.errors import SmartEmbedderError, transport_errors

# While one page of a stream is computed, the others wait in the service.
OPEN_PAGES = 3


@dataclass(frozen=True, slots=True)
class ThreadHttp:
    """The operations that differ between threads and asyncio; these block the calling thread."""

    client: httpx.Client
    threads: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, OPEN_PAGES))

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return the response."""
        response = self.client.send(request)
        if self.client.is_closed and (stream := response.extensions.get("network_stream")):
            # It was opened while another thread closed the pool, which does not know it.
            stream.close()
        return response

    async def sleep(self, seconds: float) -> None:
        """Pause before a retry."""
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs it

    def start(self, embed_page: Callable[[], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """Start to embed a page of a stream."""
        return self.threads.submit(lambda: run(embed_page()))

    async def wait(self, page: Future[Result]) -> Result:
        """Wait for the result of a page."""
        return page.result()

    async def cancel(self, pages: Iterable[Future[Any]]) -> None:
        """Drop the pages that were not started; the others run to their end."""
        for page in pages:
            page.cancel()


@dataclass(frozen=True, slots=True)
class AsyncioHttp:
    """The same operations in an event loop."""

    client: httpx.AsyncClient

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return the response."""
        return await self.client.send(request)

    async def sleep(self, seconds: float) -> None:
        """Pause before a retry."""
        await asyncio.sleep(seconds)

    def start(self, embed_page: Callable[[], Coroutine[Any, Any, Result]]) -> asyncio.Task[Result]:
        """Start to embed a page of a stream."""
        return asyncio.create_task(embed_page())

    async def wait(self, page: asyncio.Task[Result]) -> Result:
        """Wait for the result of a page."""
        return await page

    async def cancel(self, pages: Iterable[asyncio.Task[Any]]) -> None:
        """Cancel the pages, which removes their requests from the service's queue."""
        for page in pages:
            page.cancel()
        await asyncio.gather(*pages, return_exceptions=True)


Http = ThreadHttp | AsyncioHttp


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine over `ThreadHttp`, and return its result."""
    # An event loop that runs in this thread would close the coroutine's generators when it ends.
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        sys.set_asyncgen_hooks(*hooks)
    raise RuntimeError("a coroutine over ThreadHttp has waited for an event loop")


def iterate(records: AsyncGenerator[Result]) -> Generator[Result]:
    """Yield the items of a generator over `ThreadHttp`; closing this one closes it."""

    async def read_next() -> Result:
        return await anext(records)

    try:
        while True:
            try:
                record = run(read_next())
            except StopAsyncIteration:
                return
            yield record
    finally:
        run(records.aclose())


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
        """Embed all texts, in several requests if needed."""
        sizes, parts = [], []
        for size, call in embed_calls(texts, options, priority):
            parts.append(await self.send(call, resumes=resumes))
            sizes.append(size)
        return join_embeddings(parts, sizes)

    async def send(self, call: Call[Result], *, resumes: bool = False) -> Result:
        """Send a request, and again as `Retries` says, until it is answered."""
        retries = Retries(self.service.max_retries, self.service.max_wait, resumes)
        while True:
            try:
                return await self.send_once(call)
            except SmartEmbedderError as error:
                pause = retries.pause_after(error)
            await self.http.sleep(pause)

    async def send_once(self, call: Call[Result]) -> Result:
        """Send a request once, and parse the response."""
        request = self.http.client.build_request(**self.service.request(call))
        with transport_errors(self.http.client, self.service.url):
            response = await self.http.send(request)
        return call.read(response)

"""The client for asyncio."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Self, Unpack

import httpx

from smart_embedder_client import calls
from smart_embedder_client.answers import Embeddings, Health, Ranking, join_embeddings
from smart_embedder_client.calls import Answer, Call, StreamOptions, read_body_async, with_defaults
from smart_embedder_client.errors import SmartEmbedderError, transport_errors
from smart_embedder_client.options import EmbedOptions, OnError, RerankOptions
from smart_embedder_client.records import StreamedText, checked
from smart_embedder_client.streams import AsyncStream, TextOrPair


class AsyncClient:
    """Asks one service; all tasks of one event loop may share it.

    Every method raises `SmartEmbedderError` if the service refuses the request or does not answer.
    A task that is cancelled takes its request out of the service's queue.

    Args:
        url: The service's address; without it SMART_EMBEDDER_URL, else http://127.0.0.1:8000.
        token: Its access token, if one is set; without an address and a token, that in
            SMART_EMBEDDER_TOKEN.
        timeout: Seconds without a byte of an answer before a request fails; 5 to connect. The
            default is longer than the service's own limit of 90.
        max_retries: How often a request is sent again at most.
        max_wait: Seconds that the pauses of one request may take together.
        http: A client of yours for TLS, proxies and limits of connections; it is left open.

    Raises:
        ValueError: The address or the token is none.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        timeout: float = 100.0,
        max_retries: int = 5,
        max_wait: float = 120.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._service = calls.service_at(url, token, timeout, max_retries, max_wait)
        self._http = http or httpx.AsyncClient()
        self._is_own = http is None

    async def embed(
        self, texts: Sequence[str], *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """The vectors of `texts`; `priority` is 0 (urgent) to 7 (background).

        A long list is sent in several requests. ColBERT vectors are made where `return_colbert` is
        True.
        """
        sizes, parts = [], []
        for size, call in calls.embed_calls(texts, options, priority):
            parts.append(await self._send(call))
            sizes.append(size)
        return join_embeddings(parts, sizes)

    async def embed_query(
        self, query: str, *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """The vectors of one query, with what the model reads before queries, if anything."""
        asked = calls.with_input_type(options, "query")
        return await self.embed([query], priority=priority, **asked)

    async def embed_documents(
        self, texts: Sequence[str], *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """The vectors of texts that are searched, with what the model reads before such texts."""
        asked = calls.with_input_type(options, "document")
        return await self.embed(texts, priority=priority, **asked)

    async def embed_stream(
        self,
        texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair],
        *,
        on_error: OnError = "raise",
        priority: int | None = None,
        **options: Unpack[EmbedOptions],
    ) -> AsyncIterator[StreamedText]:
        """The vectors of any number of `texts`, one after the other, in constant memory.

        A text may be given as a pair of its id and itself. Texts are taken as they are needed. A
        lost connection, or a service that is restarted, is asked again for what has no answer.
        `priority` is 7 (background) unless another is asked for. With `on_error` "raise" a text
        that cannot be embedded ends the stream, with "yield" its record has the `error`.
        """
        asked = StreamOptions(with_defaults(options), priority)
        async with aclosing(AsyncStream(self._http, self._service, asked).run(texts)) as records:
            async for record in records:
                yield checked(record, on_error)

    async def rerank(
        self,
        query: str,
        passages: Sequence[str],
        *,
        priority: int | None = None,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """The passages by falling score; `priority` is 0 (urgent) to 7 (background)."""
        return await self._send(calls.rerank_call(query, passages, options, priority))

    async def count_tokens(self, texts: Sequence[str], *, model: str | None = None) -> list[int]:
        """How many tokens each text has for a model, the dense one unless named.

        Special tokens are left out.
        """
        return await self._send(calls.count_call(texts, model))

    async def health(self) -> Health:
        """Whether the service is ready; asked once."""
        return await self._send_once(calls.health_call())

    async def close(self) -> None:
        """Close the connections."""
        if self._is_own:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(self, call: Call[Answer]) -> Answer:
        retries = self._service.retries()
        while True:
            try:
                return await self._send_once(call)
            except SmartEmbedderError as error:
                pause = retries.pause_after(error)
            await asyncio.sleep(pause)

    async def _send_once(self, call: Call[Answer]) -> Answer:
        asked = self._service.request(call)
        with transport_errors(self._http, self._service.url):
            async with self._http.stream(**asked) as response:
                answer = await read_body_async(response, call.limits)
        return call.read(answer)

"""The asynchronous client."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import Self, Unpack

import httpx

from smart_embedder_client import calls
from smart_embedder_client.answers import Embeddings, Health, Ranking, Tokenized
from smart_embedder_client.options import EmbedOptions, OnError, RerankOptions
from smart_embedder_client.sending import AsyncioHttp, Sender
from smart_embedder_client.streams import Stream, StreamedText, TextOrPair


class AsyncClient:
    """A client for one service; the tasks of one event loop may share it.

    It has the arguments, methods and errors of `Client`. Cancelling a task removes its request from
    the service's queue.
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
        service = calls.service_at(url, token, timeout, max_retries, max_wait)
        self._http = http or httpx.AsyncClient()
        self._owns_http = http is None
        self._sender = Sender(AsyncioHttp(self._http), service)

    async def embed(
        self, texts: Sequence[str], *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """See `Client.embed`."""
        return await self._sender.embed(texts, options, priority)

    async def embed_query(
        self, query: str, *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """See `Client.embed_query`."""
        return await self.embed(
            [query], priority=priority, **calls.with_input_type(options, "query")
        )

    async def embed_documents(
        self, texts: Sequence[str], *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """See `Client.embed_documents`."""
        return await self.embed(
            texts, priority=priority, **calls.with_input_type(options, "document")
        )

    def embed_stream(
        self,
        texts: Iterable[TextOrPair] | AsyncIterable[TextOrPair],
        *,
        on_error: OnError = "raise",
        priority: int | None = None,
        **options: Unpack[EmbedOptions],
    ) -> AsyncIterator[StreamedText]:
        """See `Client.embed_stream`; `texts` may also be an asynchronous iterable."""
        stream = Stream(self._sender, calls.with_defaults(options), priority, on_error)
        return stream.run(texts)

    async def rerank(
        self,
        query: str,
        passages: Sequence[str],
        *,
        priority: int | None = None,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """See `Client.rerank`."""
        return await self._sender.send(calls.rerank_call(query, passages, options, priority))

    async def count_tokens(self, texts: Sequence[str], *, model: str | None = None) -> list[int]:
        """See `Client.count_tokens`."""
        return [len(tokens.ids) for tokens in await self.tokenize(texts, model=model)]

    async def tokenize(self, texts: Sequence[str], *, model: str | None = None) -> list[Tokenized]:
        """See `Client.tokenize`."""
        return await self._sender.send(calls.tokenize_call(texts, model))

    async def health(self) -> Health:
        """See `Client.health`."""
        return await self._sender.send_once(calls.health_call())

    async def close(self) -> None:
        """Close the connections."""
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

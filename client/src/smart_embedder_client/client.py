"""The synchronous client."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Self, Unpack

import httpx

from smart_embedder_client import calls
from smart_embedder_client.answers import Embeddings, Health, Ranking, Tokenized
from smart_embedder_client.options import EmbedOptions, OnError, RerankOptions
from smart_embedder_client.sending import Sender, ThreadHttp, iterate, run
from smart_embedder_client.streams import Stream, StreamedText, TextOrPair


class Client:
    """A client for one service; threads may share it.

    All methods raise `SmartEmbedderError` if the service refuses a request or does not answer.

    Args:
        url: Address of the service. Defaults to SMART_EMBEDDER_URL, else http://127.0.0.1:8000.
        token: Access token. If neither `url` nor `token` is given, SMART_EMBEDDER_TOKEN is used.
        timeout: Seconds without a byte of a response before a request fails; connecting may take
            5. The default is longer than the service's own limit of 90.
        max_retries: Maximum number of times that a request is sent again.
        max_wait: Maximum seconds that the pauses between the tries of a request take in total.
        http: Your own httpx client, for TLS, proxies and connection limits. `close` leaves it open.

    Raises:
        ValueError: The address or the token is invalid.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        timeout: float = 100.0,
        max_retries: int = 5,
        max_wait: float = 120.0,
        http: httpx.Client | None = None,
    ) -> None:
        service = calls.service_at(url, token, timeout, max_retries, max_wait)
        self._http = http or httpx.Client()
        self._owns_http = http is None
        self._sender = Sender(ThreadHttp(self._http), service)

    def embed(
        self, texts: Sequence[str], *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """Embed texts; `priority` is 0 (urgent) to 7 (background).

        A long list is sent in several requests. ColBERT vectors are returned only with
        `return_colbert=True`.
        """
        return run(self._sender.embed(texts, options, priority))

    def embed_query(
        self, query: str, *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """Embed one query, with the model's prompt for queries if it has one."""
        return self.embed([query], priority=priority, **calls.with_input_type(options, "query"))

    def embed_documents(
        self, texts: Sequence[str], *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """Embed documents, with the model's prompt for documents if it has one."""
        return self.embed(texts, priority=priority, **calls.with_input_type(options, "document"))

    def embed_stream(
        self,
        texts: Iterable[TextOrPair],
        *,
        on_error: OnError = "raise",
        priority: int | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Iterator[StreamedText]:
        """Embed any number of texts in constant memory, and yield their vectors in order.

        A text may be given as a pair `(id, text)`. Texts are read as they are needed, and sent in
        pages that take about two seconds. A page is sent again after a lost connection or a
        restart of the service. `priority` defaults to 7 (background). A text that cannot be
        embedded ends the stream with `on_error="raise"`; with "yield", its record has an `error`.
        """
        stream = Stream(self._sender, calls.with_defaults(options), priority, on_error)
        return iterate(stream.run(iter(texts)))

    def rerank(
        self,
        query: str,
        passages: Sequence[str],
        *,
        priority: int | None = None,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """Sort passages by descending score; `priority` is 0 (urgent) to 7 (background)."""
        return run(self._sender.send(calls.rerank_call(query, passages, options, priority)))

    def count_tokens(self, texts: Sequence[str], *, model: str | None = None) -> list[int]:
        """Count the tokens of each text, without special ones.

        `model` defaults to the dense model.
        """
        return [len(tokens.ids) for tokens in self.tokenize(texts, model=model)]

    def tokenize(self, texts: Sequence[str], *, model: str | None = None) -> list[Tokenized]:
        """Tokenize each text with a model, by default the dense one."""
        return run(self._sender.send(calls.tokenize_call(texts, model)))

    def health(self) -> Health:
        """Ask once whether the service is ready."""
        return run(self._sender.send_once(calls.health_call()))

    def close(self) -> None:
        """Close the connections."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

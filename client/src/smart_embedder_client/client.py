"""The client for threads."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Self, Unpack

import httpx

from smart_embedder_client import calls
from smart_embedder_client.answers import Embeddings, Health, Ranking, Tokenized
from smart_embedder_client.options import EmbedOptions, OnError, RerankOptions
from smart_embedder_client.sending import Sender, ThreadHttp, finished, iterate
from smart_embedder_client.streams import Stream, StreamedText, TextOrPair


class Client:
    """Asks one service; threads may share it.

    Every method raises `SmartEmbedderError` if the service refuses the request or does not answer.

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
        http: httpx.Client | None = None,
    ) -> None:
        service = calls.service_at(url, token, timeout, max_retries, max_wait)
        self._http = http or httpx.Client()
        self._is_own = http is None
        self._sender = Sender(ThreadHttp(self._http), service)

    def embed(
        self, texts: Sequence[str], *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """The vectors of `texts`; `priority` is 0 (urgent) to 7 (background).

        A long list is sent in several requests. ColBERT vectors are made where `return_colbert` is
        True.
        """
        return finished(self._sender.embed(texts, options, priority))

    def embed_query(
        self, query: str, *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """The vectors of one query, with what the model reads before queries, if anything."""
        asked = calls.with_input_type(options, "query")
        return self.embed([query], priority=priority, **asked)

    def embed_documents(
        self, texts: Sequence[str], *, priority: int | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """The vectors of texts that are searched, with what the model reads before such texts."""
        asked = calls.with_input_type(options, "document")
        return self.embed(texts, priority=priority, **asked)

    def embed_stream(
        self,
        texts: Iterable[TextOrPair],
        *,
        on_error: OnError = "raise",
        priority: int | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Iterator[StreamedText]:
        """The vectors of any number of `texts`, one after the other, in constant memory.

        A text may be given as a pair of its id and itself. Texts are taken as they are needed, and
        sent in pages of about two seconds. A page is sent again after a lost connection or a
        restart of the service. `priority` is 7 (background) unless another is asked for. With
        `on_error` "raise" a text that cannot be embedded ends the stream, with "yield" its record
        has the `error`.
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
        """The passages by falling score; `priority` is 0 (urgent) to 7 (background)."""
        return finished(self._sender.send(calls.rerank_call(query, passages, options, priority)))

    def count_tokens(self, texts: Sequence[str], *, model: str | None = None) -> list[int]:
        """How many tokens each text has for a model, the dense one unless named.

        Special tokens are left out.
        """
        return [len(tokens.ids) for tokens in self.tokenize(texts, model=model)]

    def tokenize(self, texts: Sequence[str], *, model: str | None = None) -> list[Tokenized]:
        """The tokens of each text for a model, the dense one unless named."""
        return finished(self._sender.send(calls.tokenize_call(texts, model)))

    def health(self) -> Health:
        """Whether the service is ready; asked once."""
        return finished(self._sender.send_once(calls.health_call()))

    def close(self) -> None:
        """Close the connections."""
        if self._is_own:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

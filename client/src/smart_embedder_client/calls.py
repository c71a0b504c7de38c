"""The requests of both clients, and the functions that read their answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx

from smart_embedder_client import safetensors
from smart_embedder_client.answers import (
    Embeddings,
    Health,
    Ranking,
    read_counts,
    read_embeddings,
    read_health,
    read_ranking,
)
from smart_embedder_client.retries import Retries

_CONNECT_SECONDS = 5.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request, and the function that reads its answer."""

    method: str
    path: str
    read: Callable[[httpx.Response], Answer]
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def embed_call(
    texts: Sequence[str], options: Mapping[str, Any], priority: int | None
) -> Call[Embeddings]:
    """The request for the vectors of `texts`."""
    body = {"sentences": _texts(texts), **options}
    # Compression hardly makes vectors smaller.
    headers = {"Accept": safetensors.MEDIA_TYPE, "Accept-Encoding": "identity"}
    return Call("POST", "/embeddings/", read_embeddings, body, headers | _priority(priority))


def rerank_call(
    query: str, passages: Sequence[str], options: Mapping[str, Any], priority: int | None
) -> Call[Ranking]:
    """The request for the order of `passages`."""
    body = {"query": query, "passages": _texts(passages), **options}
    return Call("POST", "/rerank", read_ranking, body, _priority(priority))


def count_call(texts: Sequence[str], model: str | None) -> Call[list[int]]:
    """The request for the number of tokens of each text."""
    path = "/tokenize" if model is None else f"/models/{model}/tokenize"
    return Call("POST", path, read_counts, {"inputs": _texts(texts), "add_special_tokens": False})


def health_call() -> Call[Health]:
    """The request for the state of the service."""
    return Call("GET", "/health", read_health)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options of a stream, the same in each of its requests."""

    query: Mapping[str, str]
    priority: int | None


@dataclass(frozen=True, slots=True)
class Service:
    """The service's address, and how both clients send requests to it."""

    url: str
    token: str | None
    timeout: float
    max_retries: int
    max_wait: float

    def retries(self, *, resumes: bool = False) -> Retries:
        """The retries of a new request."""
        return Retries(self.max_retries, self.max_wait, resumes)

    def request(self, call: Call[Any]) -> dict[str, Any]:
        """The arguments of httpx' `request`."""
        return {
            "method": call.method,
            "url": self.url.rstrip("/") + call.path,
            "headers": {**call.headers, **self._token_header},
            "json": call.body,
            # No limit of the wait for a connection: many requests at once have not failed.
            "timeout": self._timeout(pool=None),
        }

    def stream_request(
        self, body: bytes, options: StreamOptions, *, pool: float | None
    ) -> dict[str, Any]:
        """The arguments of httpx' `build_request` for lines of a stream.

        `pool` is the most seconds to wait for a free connection.
        """
        headers = {
            "Content-Type": "application/x-ndjson",
            "Accept": safetensors.MEDIA_TYPE,
            "Accept-Encoding": "identity",
        }
        return {
            "method": "POST",
            "url": self.url.rstrip("/") + "/embeddings/stream",
            "params": options.query,
            "headers": {**headers, **_priority(options.priority), **self._token_header},
            "content": body,
            "timeout": self._timeout(pool=pool),
        }

    @property
    def _token_header(self) -> dict[str, str]:
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def _timeout(self, *, pool: float | None) -> httpx.Timeout:
        connect = min(self.timeout, _CONNECT_SECONDS)
        return httpx.Timeout(self.timeout, connect=connect, pool=pool)


def _texts(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError("one string is no list of texts: put it into a list")
    return list(texts)


def _priority(priority: int | None) -> dict[str, str]:
    return {} if priority is None else {"Priority": f"u={priority}"}

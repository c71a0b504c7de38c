"""What both clients send: the same requests, read in the same way."""

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
    """One request, before it is sent, and what reads its answer."""

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
    # Vectors hardly get smaller by compression.
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
    """The question whether the service is ready."""
    return Call("GET", "/health", read_health)


@dataclass(frozen=True, slots=True)
class Service:
    """Where the service is and how it is asked; what both clients are made of."""

    url: str
    token: str | None
    timeout: float
    max_retries: int
    max_wait: float

    def retries(self) -> Retries:
        """Those of a new request."""
        return Retries(self.max_retries, self.max_wait)

    def request(self, call: Call[Any]) -> dict[str, Any]:
        """The arguments of httpx' `request`."""
        token = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        return {
            "method": call.method,
            "url": self.url.rstrip("/") + call.path,
            "headers": {**call.headers, **token},
            "json": call.body,
            # A request of many that wait for a free connection has not failed.
            "timeout": httpx.Timeout(
                self.timeout, connect=min(self.timeout, _CONNECT_SECONDS), pool=None
            ),
        }


def _texts(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError("one string is no list of texts: put it into a list")
    return list(texts)


def _priority(priority: int | None) -> dict[str, str]:
    return {} if priority is None else {"Priority": f"u={priority}"}

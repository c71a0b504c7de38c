"""Which path is answered in which dialect: the one table, read before a body is.

A dialect is the API of another server or of a hosted service, whose clients can be pointed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from app.engine.job import Purpose
from app.observability.metrics import EMBEDDING_ENDPOINT


class Dialect(Enum):
    """Whose API a request is written for; its errors are answered in the same one."""

    NATIVE = "Smart Embedder"
    OPENAI = "OpenAI"
    COHERE = "Cohere, Jina, vLLM"
    VLLM = "vLLM"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A POST that asks for work: `path` names it in metrics and traces."""

    path: str
    purpose: Purpose = Purpose.EMBEDDING


NATIVE_EMBEDDINGS = Endpoint(EMBEDDING_ENDPOINT)
OPENAI_EMBEDDINGS = Endpoint("/v1/embeddings")
RERANK = Endpoint("/rerank", Purpose.RERANKING)
SCORE = Endpoint("/score", Purpose.RERANKING)
ENDPOINTS = (NATIVE_EMBEDDINGS, OPENAI_EMBEDDINGS, RERANK, SCORE)


@dataclass(frozen=True, slots=True)
class _Route:
    """What a path is for; where `dialects` share it, the fields of a body tell them apart."""

    endpoint: Endpoint
    dialects: tuple[Dialect, ...]


NATIVE_ONLY = (Dialect.NATIVE,)
_OPENAI = (Dialect.OPENAI,)
_VLLM = (Dialect.VLLM,)
_RERANKS = _Route(RERANK, (Dialect.NATIVE, Dialect.COHERE))

_WORK: Mapping[str, _Route] = {
    "/embeddings/": _Route(NATIVE_EMBEDDINGS, (Dialect.NATIVE, Dialect.OPENAI)),
    "/v1/embeddings": _Route(OPENAI_EMBEDDINGS, _OPENAI),
    "/rerank": _RERANKS,
    "/v1/rerank": _RERANKS,
    "/v2/rerank": _RERANKS,
    "/score": _Route(SCORE, _VLLM),
    "/v1/score": _Route(SCORE, _VLLM),
}
# Paths that are read, and those below them.
_READ: Mapping[str, tuple[Dialect, ...]] = {"/v1/models": _OPENAI, "/models": _OPENAI}


def endpoint_of(path: str) -> Endpoint | None:
    """What a POST to `path`, without a slash at its end, asks for."""
    route = _WORK.get(path)
    return None if route is None else route.endpoint


def dialects_of(path: str) -> tuple[Dialect, ...]:
    """The dialects that a request to `path` may be written in, before its body is read."""
    route = _WORK.get(path)
    if route is not None:
        return route.dialects
    return next((found for top, found in _READ.items() if _is_at(path, top)), NATIVE_ONLY)


def _is_at(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")

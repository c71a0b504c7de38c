"""The table from paths to endpoints and dialects, which is used before a body is read.

A dialect is the API of another server or of a hosted service, whose clients can be pointed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from app.engine.scheduling.job import Purpose
from app.observability.labels import EMBEDDING_ENDPOINT


class Dialect(Enum):
    """The API that a request is written for, and that its errors follow."""

    NATIVE = "Smart Embedder"
    OPENAI = "OpenAI"
    COHERE = "Cohere, Jina, vLLM"
    VLLM = "vLLM"
    TEI = "text-embeddings-inference"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A POST that asks for work; `path` is its name in metrics and traces.

    An endpoint that `streams` answers while it reads the body, which may never end.
    """

    path: str
    purpose: Purpose = Purpose.EMBEDDING
    streams: bool = False


NATIVE_EMBEDDINGS = Endpoint(EMBEDDING_ENDPOINT)
EMBEDDING_STREAM = Endpoint("/embeddings/stream", streams=True)
OPENAI_EMBEDDINGS = Endpoint("/v1/embeddings")
RERANK = Endpoint("/rerank", Purpose.RERANKING)
SCORE = Endpoint("/score", Purpose.RERANKING)
TEI_EMBED = Endpoint("/embed")
TEI_EMBED_ALL = Endpoint("/embed_all")
TEI_EMBED_SPARSE = Endpoint("/embed_sparse")
TEI_SIMILARITY = Endpoint("/similarity")
TEI_TOKENIZE = Endpoint("/tokenize")
TEI_DECODE = Endpoint("/decode")
TEI_PREDICT = Endpoint("/predict", Purpose.RERANKING)
_TEI_ENDPOINTS = (
    TEI_EMBED,
    TEI_EMBED_ALL,
    TEI_EMBED_SPARSE,
    TEI_SIMILARITY,
    TEI_TOKENIZE,
    TEI_DECODE,
    TEI_PREDICT,
)
COHERE_EMBED = Endpoint("/v2/embed")
EMBEDDING_SERVER = Endpoint("/api/v1/embed")
ENDPOINTS = (
    NATIVE_EMBEDDINGS,
    EMBEDDING_STREAM,
    OPENAI_EMBEDDINGS,
    RERANK,
    SCORE,
    *_TEI_ENDPOINTS,
    COHERE_EMBED,
    EMBEDDING_SERVER,
)


@dataclass(frozen=True, slots=True)
class _Route:
    """The endpoint of a path; if several `dialects` share it, the fields of the body decide."""

    endpoint: Endpoint
    dialects: tuple[Dialect, ...]


NATIVE_ONLY = (Dialect.NATIVE,)
_OPENAI = (Dialect.OPENAI,)
_VLLM = (Dialect.VLLM,)
_TEI = (Dialect.TEI,)
_RERANKS = _Route(RERANK, (Dialect.NATIVE, Dialect.TEI, Dialect.COHERE))

_WORK: Mapping[str, _Route] = {
    "/embeddings/": _Route(NATIVE_EMBEDDINGS, (Dialect.NATIVE, Dialect.OPENAI)),
    EMBEDDING_STREAM.path: _Route(EMBEDDING_STREAM, NATIVE_ONLY),
    "/v1/embeddings": _Route(OPENAI_EMBEDDINGS, _OPENAI),
    "/rerank": _RERANKS,
    "/v1/rerank": _RERANKS,
    "/v2/rerank": _RERANKS,
    "/score": _Route(SCORE, _VLLM),
    "/v1/score": _Route(SCORE, _VLLM),
    "/v1/embed": _Route(COHERE_EMBED, (Dialect.COHERE,)),
    "/v2/embed": _Route(COHERE_EMBED, (Dialect.COHERE,)),
    "/api/v1/embed": _Route(EMBEDDING_SERVER, _TEI),
}
# The root itself is this service's own for every other method.
_WORK_AT_ROOT = {**_WORK, "/": _Route(TEI_EMBED, (Dialect.NATIVE, Dialect.TEI))} | {
    each.path: _Route(each, _TEI) for each in _TEI_ENDPOINTS
}
# The paths of one model, below /models/{model}.
_WORK_OF_A_MODEL = {each.path: _Route(each, _TEI) for each in (*_TEI_ENDPOINTS, RERANK)} | {
    path: _Route(OPENAI_EMBEDDINGS, _OPENAI) for path in ("/v1/embeddings", "/embeddings")
}
_MODELS = "/models"
_READ: Mapping[str, tuple[Dialect, ...]] = {
    _MODELS: _OPENAI,
    f"/v1{_MODELS}": _OPENAI,
    "/info": _TEI,
    "/ping": _TEI,
}
_BELOW_OPENAI = ("/v1/", "/openai/")
_HEALTH = ("/ping", "/health")


def endpoint_of(path: str) -> Endpoint | None:
    """The endpoint of a POST to `path`, which has no slash at its end."""
    route = _route_of(path)
    return None if route is None else route.endpoint


def dialects_of(path: str) -> tuple[Dialect, ...]:
    """The dialects that a request to `path` may be written in, before its body is read."""
    route = _route_of(path)
    if route is not None:
        return route.dialects
    if path in _READ:
        return _READ[path]
    if path.startswith(f"{_MODELS}/"):
        return _TEI
    # There is nothing, which OpenAI's and Azure's clients can be told in their own shape.
    return _OPENAI if f"{path}/".startswith(_BELOW_OPENAI) else NATIVE_ONLY


def is_health_check(path: str) -> bool:
    """Whether the path is a dialect's health check, which needs no token."""
    return path == "/ping" or (path.startswith(f"{_MODELS}/") and path.endswith(_HEALTH))


def _route_of(path: str) -> _Route | None:
    if path in _WORK_AT_ROOT:
        return _WORK_AT_ROOT[path]
    if path.startswith(f"{_MODELS}/"):
        for end, route in _WORK_OF_A_MODEL.items():
            if path.endswith(end):
                return route
        if path.count("/") == _MODELS.count("/") + 1:  # A model itself, by a name without a slash.
            return _Route(TEI_EMBED, _TEI)
    return None

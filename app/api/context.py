"""The context of a request: one record from the outermost middleware to the log line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from starlette.types import Scope

from app.access.tokens import DEFAULT_NAME
from app.engine.checks import AnswerMemory
from app.engine.scheduling.job import Purpose
from app.observability.metrics import EMBEDDING_ENDPOINT
from app.observability.tracing import Stage


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


class StreamMemory(Protocol):
    """Counts what a stream holds against the limits for bodies and answers."""

    def release_body(self, size: int) -> None:
        """Record that `size` bytes of the body are no longer held."""

    def hold_vectors(self, size: int) -> None:
        """Record that `size` bytes of vectors wait to be sent."""

    def release_vectors(self, size: int) -> None:
        """Record that `size` bytes of vectors no longer wait."""


@dataclass(slots=True)
class RequestContext:
    """The facts of one request; middleware and endpoints fill in what they learn.

    `endpoint` is None for a request that is no POST for work. `dialects` are those of the path; if
    there are several, the body decides, and until it has been read, errors are answered in the
    shapes of all of them. `status` is None until the response begins; `error_status` is the native
    status of an error, whatever the dialect's is. `counts` holds numbers for the log line, `stages`
    the times for the trace. `memory` is set for a stream. `answer` is asked for room before an
    answer is made.
    `path` is as the client wrote it, `route` without slashes at its end; neither has the `prefix`
    that a proxy removes from paths. `query` is not parsed.
    """

    request_id: str
    path: str
    endpoint: Endpoint | None
    client_address: str
    dialects: tuple[Dialect, ...] = NATIVE_ONLY
    token_name: str | None = None
    error_code: str | None = None
    error_status: int | None = None
    status: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    counts: dict[str, int | float] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    memory: StreamMemory | None = None
    answer: AnswerMemory = field(default_factory=AnswerMemory)
    route: str = "/"
    prefix: str = ""
    query: bytes = b""

    @property
    def way_up(self) -> str:
        """What relative links of a page begin with: a path with a slash at its end is deeper."""
        return "../" if self.path.endswith("/") else ""

    @property
    def client(self) -> str:
        """The key by which clients are told apart: `token:NAME` or `address:ADDRESS`.

        Rate limit, memory limit and the fairness of the queue use this one key. A named token is
        one client wherever it comes from; requests with API_TOKEN or without a token count for
        their address.
        """
        if self.token_name in {None, DEFAULT_NAME}:
            return f"address:{self.client_address}"
        return f"token:{self.token_name}"


def context_of(scope: Scope) -> RequestContext:
    """The context of an HTTP request."""
    context: RequestContext = scope["state"]["context"]
    return context


def is_stream(scope: Scope) -> bool:
    """Whether it is a stream, whose parts are limited instead of its body."""
    endpoint = working_endpoint(scope)
    return endpoint is not None and endpoint.streams


def working_endpoint(scope: Scope) -> Endpoint | None:
    """The endpoint of a POST that asks for work; None for every other request."""
    return context_of(scope).endpoint if scope["type"] == "http" else None

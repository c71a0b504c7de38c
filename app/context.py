"""The context of a request: its dialect, its endpoint, and a record for the log line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from app.http_metrics import EMBEDDING_ENDPOINT, RERANK_ENDPOINT
from smart_embedder.requests import AnswerMemory, Charge, Purpose
from smart_embedder.results import Stage

DEFAULT_NAME = "default"
# In API_TOKENS_FILE, the name whose token may load and unload models, as API_TOKEN may.
OPERATOR_NAME = "operator"

# The paths that PROTECT_METRICS protects.
METRICS_PATHS = ("/stats", "/metrics")


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """An error independent of the dialect.

    `status` is the native one; `problems` lists the faults of an invalid body.
    """

    message: str
    code: str
    status: int
    problems: list[dict[str, str]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """The API that a request is written for, and the shape of its errors.

    `error_body` takes an error and the request id, and makes the body of the response. `statuses`
    has the statuses that differ from the native ones, by the code of the error.
    """

    name: str
    error_body: Callable[[ErrorFacts, str], dict[str, Any]]
    statuses: Mapping[str, int] = field(default_factory=dict)


def _native_error(error: ErrorFacts, request_id: str) -> dict[str, Any]:
    body = {"detail": error.message, "code": error.code, "request_id": request_id}
    return body if error.problems is None else body | {"errors": error.problems}


NATIVE = Dialect("Smart Embedder", _native_error)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A POST for work: one that runs a model or its tokenizer.

    `path` is its name in metrics and traces.
    """

    path: str
    purpose: Purpose = Purpose.EMBEDDING


NATIVE_EMBEDDINGS = Endpoint(EMBEDDING_ENDPOINT)
RERANK = Endpoint(RERANK_ENDPOINT, Purpose.RERANKING)
EXTRACT = Endpoint("/extract")


@dataclass(slots=True)
class RequestContext:
    """The facts of one request, filled in by middleware and endpoints.

    - `path` is as the client wrote it, `route` without slashes at its end. Neither has the `prefix`
      that a proxy removes from paths. `query` is not parsed.
    - `endpoint` is None unless the request is a POST for work. `is_public` is True if the path
      needs no token.
    - `dialects` are those of the path. If there are several, the body decides; until it has been
      read, errors have the fields of all of them.
    - `client_weight` and `charge` are those of `ClientOptions`, which API_TOKENS_FILE sets.
    - `status` is None until the response begins. `error_status` is the native status of an error.
    - `counts` holds numbers for the log line, `stages` the times for the trace.
    - `answer` is asked for memory before a response is made.
    - `if_vector_space` holds the ids of the vector spaces that the client requires,
      `vector_spaces` those of the response, by kind.
    - `replaced` holds JSON pointers to the strings of the body that had lone surrogates.
    """

    request_id: str
    path: str
    endpoint: Endpoint | None
    client_address: str
    dialects: tuple[Dialect, ...] = (NATIVE,)
    is_public: bool = False
    token_name: str | None = None
    client_weight: int = 1
    charge: Charge | None = None
    error_code: str | None = None
    error_status: int | None = None
    status: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    counts: dict[str, int | float] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    answer: AnswerMemory = field(default_factory=AnswerMemory)
    route: str = "/"
    prefix: str = ""
    query: bytes = b""
    if_vector_space: str = ""
    vector_spaces: dict[str, str] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)

    @property
    def relative_root(self) -> str:
        """The prefix of relative links in a page: a path with a slash at its end is one deeper."""
        return "../" if self.path.endswith("/") else ""

    @property
    def client(self) -> str:
        """The key that identifies the client: `token:NAME` or `address:ADDRESS`.

        The rate limit, the memory limit and the queue use this key. A named token is one client,
        whatever its address; requests with API_TOKEN or without a token count for their address.
        """
        if self.token_name in {None, DEFAULT_NAME}:
            return f"address:{self.client_address}"
        return f"token:{self.token_name}"


def context_of(scope: Scope) -> RequestContext:
    """The context of an HTTP request."""
    context: RequestContext = scope["state"]["context"]
    return context


def find_work_endpoint(scope: Scope) -> Endpoint | None:
    """The endpoint of a POST for work; None for every other request."""
    return context_of(scope).endpoint if scope["type"] == "http" else None


@dataclass(slots=True)
class PathFacts:
    """The facts of a path, before routing; `endpoint` is None if it has no POST for work."""

    dialects: tuple[Dialect, ...] = ()
    endpoint: Endpoint | None = None
    is_public: bool = False

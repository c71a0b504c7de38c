"""What is known of a request: its dialect, its endpoint, and a record for the log line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from app.http_metrics import EMBEDDING_ENDPOINT, RERANK_ENDPOINT
from smart_embedder.requests import AnswerMemory, Purpose
from smart_embedder.results import Stage

DEFAULT_NAME = "default"
# Of API_TOKENS_FILE: whose token may load and unload models, as API_TOKEN may.
OPERATOR_NAME = "operator"

# The paths that PROTECT_METRICS protects.
COUNTERS = ("/stats", "/metrics")


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

    `error_body` makes the body of an error in the request of some id. `statuses` are those that
    differ from the native ones, by the error's code.
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
    """A POST that asks for work; `path` is its name in metrics and traces."""

    path: str
    purpose: Purpose = Purpose.EMBEDDING


NATIVE_EMBEDDINGS = Endpoint(EMBEDDING_ENDPOINT)
RERANK = Endpoint(RERANK_ENDPOINT, Purpose.RERANKING)


@dataclass(slots=True)
class RequestContext:
    """The facts of one request; middleware and endpoints fill in what they learn.

    `endpoint` is None for a request that is no POST for work. `dialects` are those of its path; if
    there are several, the body decides, and until it has been read, errors are answered in the
    shapes of all. `is_public` is True where the path needs no token. `status` is None until the
    response begins;
    `error_status` is the native status of an error, whatever the dialect's is. `counts` holds
    numbers for the log line, `stages` the times for the trace. `answer` is asked for room before an
    answer is made.
    `path` is as the client wrote it, `route` without slashes at its end; neither has the `prefix`
    that a proxy removes from paths. `query` is not parsed. `if_vector_space` has the ids of spaces
    that the answer's vectors must be of, and `vector_spaces` those that they are of, by kind.
    `replaced` are JSON pointers to the strings of the body that had lone surrogates.
    """

    request_id: str
    path: str
    endpoint: Endpoint | None
    client_address: str
    dialects: tuple[Dialect, ...] = (NATIVE,)
    is_public: bool = False
    token_name: str | None = None
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


def find_work_endpoint(scope: Scope) -> Endpoint | None:
    """The endpoint of a POST that asks for work; None for every other request."""
    return context_of(scope).endpoint if scope["type"] == "http" else None


@dataclass(slots=True)
class PathFacts:
    """The facts of a path, before routing; `endpoint` is None where no POST asks for work."""

    dialects: tuple[Dialect, ...] = ()
    endpoint: Endpoint | None = None
    is_public: bool = False

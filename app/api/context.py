"""The context of a request: one record from the outermost middleware to the log line."""

from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Scope

from app.access.api_tokens import DEFAULT_NAME
from app.api.paths import NATIVE_ONLY, Dialect, Endpoint
from app.engine.answer_memory import AnswerMemory
from app.observability.tracing import Stage


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

"""What is known of a request: its dialect, its endpoint, and a record of it down to the log line.

Which dialects there are, and where, each one's router tells.
"""

import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Scope

from smart_embedder.access.tokens import DEFAULT_NAME
from smart_embedder.api.schemas import RequestModel
from smart_embedder.engine.records import AnswerMemory, Stage
from smart_embedder.engine.scheduling.job import Purpose
from smart_embedder.observability.metrics import EMBEDDING_ENDPOINT, RERANK_ENDPOINT

# Of a header with preferences, and of its items.
_MAX_CHARACTERS = 1024
_MAX_ITEMS = 64
_QUALITY = re.compile(r"0(\.\d{0,3})?|1(\.0{0,3})?")


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


@dataclass(frozen=True, slots=True)
class Operation:
    """Work that can be asked for in one dialect, by a body of `schema`.

    Of the operations that share a path, only this one's bodies have the field `field`. `answer` is
    called with the body and the `Call`.
    """

    dialect: Dialect
    endpoint: Endpoint
    field: str
    schema: type[RequestModel]
    answer: Callable[[Any, Any], Coroutine[Any, Any, Response]]


@dataclass(slots=True)
class Place:
    """What a path alone tells of a request; those of no dialect are this service's own.

    Of the operations that share it, this service's own is the first. `endpoint` is None where no
    POST asks for work. A health check needs no token. `path` may hold names in braces.
    """

    path: str
    dialects: tuple[Dialect, ...] = ()
    endpoint: Endpoint | None = None
    operations: tuple[Operation, ...] = ()
    is_health_check: bool = False


class Paths:
    """The places of all paths.

    `below` has beginnings of paths where errors have the shape of a dialect though nothing is
    there.
    """

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._patterns: dict[str, re.Pattern[str]] = {}
        self.below: dict[str, Dialect] = {}

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Every endpoint."""
        found = dict.fromkeys(place.endpoint for place in self._places.values())
        return tuple(each for each in found if each is not None)

    def add(self, told: Place) -> None:
        """Add what is told of a path."""
        path = told.path
        place = self._places.setdefault(path, Place(path))
        place.dialects = tuple(dict.fromkeys(place.dialects + told.dialects))
        place.endpoint = place.endpoint or told.endpoint
        place.operations += told.operations
        place.is_health_check |= told.is_health_check
        if "{" in path:
            self._patterns[path] = compile_path(path)[0]

    def find(self, path: str) -> tuple[Place, dict[str, str]]:
        """The place of `path`, which has no slash at its end, and what its names stand for."""
        if path in self._places:
            return self._places[path], {}
        for template, pattern in self._patterns.items():
            if match := pattern.match(path):
                return self._places[template], match.groupdict()
        below = (each for prefix, each in self.below.items() if f"{path}/".startswith(prefix))
        return Place(path, (next(below, NATIVE),)), {}


@dataclass(slots=True)
class RequestContext:
    """The facts of one request; middleware and endpoints fill in what they learn.

    `endpoint` is None for a request that is no POST for work. `dialects` and `operations` are those
    of its `place`; if there are several, the body decides, and until it has been read, errors are
    answered in the shapes of all dialects. `status` is None until the response begins;
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
    operations: tuple[Operation, ...] = ()
    place: Place = field(default_factory=partial(Place, "/"))
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


def working_endpoint(scope: Scope) -> Endpoint | None:
    """The endpoint of a POST that asks for work; None for every other request."""
    return context_of(scope).endpoint if scope["type"] == "http" else None


def preference(headers: Headers, name: str) -> str:
    """The values of a header, joined; empty where there is none, or too much of it.

    It is read on the event loop, before any limit counts the request: a value that is longer than
    any real one is ignored.
    """
    joined = ", ".join(headers.getlist(name))
    return joined if len(joined) <= _MAX_CHARACTERS else ""


def preferences(header: str) -> dict[str, float]:
    """The quality, 0 to 1, of each item of an Accept or Accept-Encoding header, by RFC 9110.

    A malformed item is ignored, which is no reason to refuse a request, and so are items beyond
    those that a real header has.
    """
    found: dict[str, float] = {}
    for item in header.lower().split(",", _MAX_ITEMS)[:_MAX_ITEMS]:
        name, *parameters = (part.strip() for part in item.split(";"))
        quality = next((each[2:] for each in parameters if each.startswith("q=")), "1")
        if name and _QUALITY.fullmatch(quality):
            found[name] = float(quality)
    return found


@lru_cache(maxsize=256)  # Clients send the same header with every request.
def preferred(header: str, offered: tuple[str, ...]) -> str | None:
    """The one of `offered` that such a header likes best, the first of equals; None for none."""
    wanted = preferences(header)
    liked = [name for name in offered if wanted.get(name)]
    return max(liked, key=lambda name: wanted[name], default=None)

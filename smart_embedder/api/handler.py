"""What endpoints share: the parts of the service, and the path of a request that asks for work.

`respond` takes such a request from its body to its response. An endpoint defines an operation for
it: a schema, and a function from a valid body to a rendered response. The API of another server is
another operation.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

import http_sf
from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from smart_embedder.access.rate_limit import Buckets
from smart_embedder.api.body import Operation, max_json_values, read_body
from smart_embedder.api.catalogue import ModelCatalogue, ServedModel, name_of
from smart_embedder.api.context import NATIVE, Dialect, Endpoint, Paths, RequestContext, context_of
from smart_embedder.api.negotiation import preference
from smart_embedder.api.rendering import JSON, Chunk, ChunkedResponse, timings_as_json
from smart_embedder.engine import DEFAULT_URGENCY, Engine
from smart_embedder.engine.model import DownloadStatus, LoadedModels
from smart_embedder.engine.model_pool import SHARE_FOR_LOADING
from smart_embedder.engine.records import ClassificationResult, EmbeddingResult, RerankResult
from smart_embedder.engine.scheduling.fairness import FairSemaphore, LoopTurns
from smart_embedder.errors import ClientGoneError, InferenceTimeoutError
from smart_embedder.observability.metrics import Metrics
from smart_embedder.observability.tracing import Stage, Tracer
from smart_embedder.server.drain import Drain
from smart_embedder.settings import Settings

Result = TypeVar("Result")
WorkResult = TypeVar("WorkResult", EmbeddingResult, RerankResult, ClassificationResult)
Handler = TypeVar("Handler", bound=Callable[..., Any])

# Rendering what holds so many bytes takes three milliseconds: JSON is three times as long.
LARGE_ANSWER_BYTES = 32_768
_LEAST_URGENT = 7


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of one running service.

    `stream_slots` are the slots of the queue that streams may take; the rest is left to other
    requests. `turns` are for whatever may hold the event loop for some milliseconds. `shared` are
    the operations that dialects bring to paths of others.
    """

    settings: Settings
    catalogue: ModelCatalogue
    metrics: Metrics
    engine: Engine
    downloads: DownloadStatus
    drain: Drain
    buckets: Buckets
    tracer: Tracer | None
    render_threads: Executor
    stream_slots: FairSemaphore
    turns: LoopTurns
    shared: Mapping[str, Sequence[Operation]]

    @property
    def status(self) -> tuple[str, str | None]:
        """`status` and `reason` of /health."""
        failure = self.engine.failure
        if failure is not None:
            return "unhealthy", str(failure)
        if self.drain.announced or self.engine.closing:
            return "draining", "the service is shutting down"
        if self.engine.loaded() is None:
            return "loading", "the models are being loaded"
        return "healthy", None


async def get_service(request: Request) -> Service:
    """The service behind this app."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(get_service)]


@dataclass(frozen=True, slots=True)
class Call:
    """A request in work; its `leases` are held to its end, at the latest at `deadline`.

    `leased` are the models that they hold, by the name that the request gives; see `Engine.lease`.
    """

    request: Request
    service: Service
    leases: AsyncExitStack = field(default_factory=AsyncExitStack)
    leased: dict[str | None, LoadedModels] = field(default_factory=dict)
    deadline: float | None = None

    @property
    def context(self) -> RequestContext:
        """What is known of the request."""
        return context_of(self.request.scope)

    async def lease(self, model: ServedModel | None) -> LoadedModels:
        """The models for a request that names `model`, loaded until the request is answered.

        Raises as `Engine.lease`.
        """
        name = name_of(model)
        if (held := self.leased.get(name)) is not None:
            return held
        left = self.service.settings.request_timeout
        if self.deadline is not None:
            left = max(0.0, self.deadline - asyncio.get_running_loop().time())
        lease = self.service.engine.lease(name, SHARE_FOR_LOADING * left)
        self.leased[name] = models = await self.leases.enter_async_context(lease)
        return models

    async def run(self, work: Coroutine[Any, Any, WorkResult], **counts: int) -> WorkResult:
        """The result of `work`; records `counts`, tokens and stages for log and trace."""
        result = await work
        timings = timings_as_json(result.timings)
        self.context.counts = counts | {
            "tokens": result.tokens,
            "tokenize_ms": timings["tokenize"],
            "queue_ms": timings["queue"],
            "inference_ms": timings["inference"],
        }
        self.context.stages.extend(result.timings.stages)
        return result

    async def render(
        self, render: Callable[[], Iterable[Chunk]], media_type: str = JSON
    ) -> Response:
        """Render the response, off the event loop if much is held for it.

        What is beyond some megabytes is rendered while the client reads it.
        """
        began, context, threads = time.perf_counter(), self.context, self.service.render_threads
        create = partial(ChunkedResponse, render, self.request, threads, media_type)
        if context.answer.held < LARGE_ANSWER_BYTES:
            response = create()
        else:
            response = await asyncio.get_running_loop().run_in_executor(threads, create)
        context.stages.append(Stage("render", began, time.perf_counter()))
        return response


class Router(APIRouter):
    """The paths of one dialect, and what the rest of the service must know of them.

    `groups` describe the tags of its operations. `below` are beginnings of paths where errors have
    the dialect's shape, whether there is something or not. `endpoints` and `shared` hold what is
    done where, by path; `health_checks` are the paths that need no token.
    """

    def __init__(
        self,
        dialect: Dialect = NATIVE,
        groups: Sequence[Mapping[str, str]] = (),
        below: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.dialect, self.groups, self.below = dialect, groups, below
        self.endpoints: dict[str, Endpoint] = {}
        self.shared: list[tuple[str, Operation]] = []
        self.health_checks: set[str] = set()

    def work(
        self, path: str, endpoint: Endpoint, **description: Any
    ) -> Callable[[Handler], Handler]:
        """Register the function that answers what asks for work at `path`, as `endpoint`."""
        self.endpoints[path] = endpoint
        return self.post(path, **description)

    def share(self, operation: Operation, *paths: str) -> None:
        """Answer `operation` at paths of other dialects, too: its bodies have its field."""
        self.shared += [(path, operation) for path in paths]

    def get_and_head(self, path: str, **description: Any) -> Callable[[Handler], Handler]:
        """Register an endpoint for GET and, without a description of its own, for HEAD."""

        def register(endpoint: Handler) -> Handler:
            self.head(path, include_in_schema=False)(endpoint)
            return self.get(path, **description)(endpoint)

        return register

    def health_check(self, path: str, **description: Any) -> Callable[[Handler], Handler]:
        """The same for a path that needs no token."""
        self.health_checks.add(path)
        return self.get_and_head(path, **description)


def paths_of(routers: Sequence[Router]) -> Paths:
    """The places of all paths of these."""
    paths = Paths()
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute):
                path = route.path
                is_health_check = path in router.health_checks
                paths.add(path, router.dialect, router.endpoints.get(path), is_health_check)
        for prefix in router.below:
            paths.add_below(prefix, router.dialect)
    for router in routers:
        for path, operation in router.shared:
            paths.add(path, operation.dialect, operation.endpoint)
    return paths


def shared_by(routers: Sequence[Router]) -> dict[str, list[Operation]]:
    """By path, the operations that dialects bring to paths of others."""
    found: dict[str, list[Operation]] = {}
    for router in routers:
        for path, operation in router.shared:
            found.setdefault(path, []).append(operation)
    return found


async def respond(request: Request, operation: Operation) -> Response:
    """Read the body and answer it, all within REQUEST_TIMEOUT and while the client stays.

    It is answered by `operation`, or by the one of those sharing the path whose field it has.
    """
    service: Service = request.app.state.service
    others = service.shared.get(context_of(request.scope).route, ())
    # The first one decides how errors look before the body is known.
    operations = sorted((operation, *others), key=lambda each: each.dialect is not NATIVE)
    async with time_limit(service.settings.request_timeout) as timeout:
        values = max_json_values(service.settings)
        asked, body = await read_body(request, operations, values, service.turns)
        async with AsyncExitStack() as leases:
            call = Call(request, service, leases, deadline=timeout.when())
            return await cancel_on_disconnect(request, asked.answer(body, call))


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Raises `InferenceTimeoutError` where the block takes longer than `seconds`.

    The block includes the body: a client that sends it too slowly gets the same error (504) as one
    whose work takes too long.
    """
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield timeout
    except TimeoutError:
        if not timeout.expired():
            raise
        raise InferenceTimeoutError(
            f"the request took longer than {seconds:g} seconds (REQUEST_TIMEOUT): send fewer texts"
        ) from None


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, for a request whose body has been read whole.

    If the client disconnects, cancels the work and raises `ClientGoneError`.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client left before its request was answered")
    finally:
        disconnect.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def urgency_of(request: Request, default: int = DEFAULT_URGENCY) -> int:
    """The urgency in the Priority header; malformed values are ignored, as RFC 9218 demands."""
    priority = preference(request.headers, "priority")
    if not priority:
        return default
    try:
        fields = http_sf.parse(priority.encode("latin-1"), tltype="dictionary")
    except http_sf.StructuredFieldError:
        return default
    entry = fields.get("u") if isinstance(fields, dict) else None
    value = entry[0] if isinstance(entry, tuple) else None
    # A boolean is an int in Python, and another type in the RFC.
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LEAST_URGENT:
        return value
    return default

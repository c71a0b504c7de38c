"""What endpoints share: the parts of the service, and a request that asks for work.

`Call` has the engine compute what an endpoint needs, and renders the response.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from prometheus_client import Counter
from starlette.responses import Response

from app.answers import JSON, Chunk, ChunkedResponse, timings_as_json
from app.catalogue import Role, ServedModel
from app.context import RequestContext, context_of
from app.errors import ClientGoneError
from app.headers import is_bulk
from app.schemas import check_passages, check_rerank_options, check_texts
from app.service import Service
from smart_embedder.errors import (
    InferenceTimeoutError,
    InvalidRequestError,
    TextTooLongError,
)
from smart_embedder.interface import (
    SHARE_FOR_LOADING,
    LoadedModels,
)
from smart_embedder.interrupts import failing_with
from smart_embedder.requests import EmbedRequest, RerankRequest
from smart_embedder.results import EmbeddingResult, RerankResult, Stage, sigmoid
from smart_embedder.vector_space import require_spaces

Result = TypeVar("Result")
WorkRequest = TypeVar("WorkRequest", EmbedRequest, RerankRequest)
WorkResult = TypeVar("WorkResult", EmbeddingResult, RerankResult)

# Rendering what holds so many bytes takes three milliseconds: JSON is three times as long.
LARGE_ANSWER_BYTES = 32_768


class Call(Request):
    """A request in work, whose body is parsed: FastAPI validates it by the endpoint's signature.

    Its `leases` are held to its end, at the latest at `deadline`. `leased` are the models that they
    hold, by the name that the request gives; see `EngineCore.lease`.
    """

    def __init__(
        self,
        request: Request,
        service: Service,
        leases: AsyncExitStack,
        value: Any = None,
        deadline: float | None = None,
    ) -> None:
        super().__init__(request.scope, request.receive)
        self.service, self.leases, self.deadline = service, leases, deadline
        self.leased: dict[str | None, LoadedModels] = {}
        self._value = value

    async def body(self) -> bytes:
        """Not empty: FastAPI asks for nothing else."""
        return b"parsed"

    async def json(self) -> Any:
        """The parsed body."""
        return self._value

    def forget_body(self) -> None:
        """Free the parsed body, whose texts the endpoint has: FastAPI would hold it to the end."""
        if isinstance(self._value, dict):
            self._value.clear()

    @property
    def context(self) -> RequestContext:
        """What is known of the request."""
        return context_of(self.scope)

    async def lease(self, model: ServedModel | None) -> LoadedModels:
        """Lease the models that a request names by `model` until it is answered.

        As `EngineCore.lease`.
        """
        name = model.name if model else None
        if (held := self.leased.get(name)) is not None:
            return held
        left = self.service.settings.request_timeout
        if self.deadline is not None:
            left = max(0.0, self.deadline - asyncio.get_running_loop().time())
        lease = self.service.engine.lease(name, SHARE_FOR_LOADING * left)
        self.leased[name] = models = await self.leases.enter_async_context(lease)
        return models

    async def run(
        self,
        work: Callable[[LoadedModels, WorkRequest], Awaitable[WorkResult]],
        request: WorkRequest,
        model: ServedModel | None,
        counter: Counter,
        **counts: int,
    ) -> WorkResult:
        """The result of `work`, done for this client and in the class of this call.

        Records `counts`, tokens and stages for log and trace; `counter` counts them, too.
        """
        models, context = await self.lease(model), self.context
        self.forget_body()
        request = replace(
            request,
            is_bulk=is_bulk(self),
            client=context.client,
            model=model.name if model else None,
            answer=context.answer,
        )
        self.require_spaces(models, request)
        result = await work(models, request)
        if context.replaced:
            result = replace(result, replaced=tuple(context.replaced))
        counter.inc(sum(counts.values()))
        timings = timings_as_json(result.timings)
        context.counts = counts | {
            "tokens": result.tokens,
            "tokenize_ms": timings["tokenize"],
            "queue_ms": timings["queue"],
            "inference_ms": timings["inference"],
        }
        context.stages.extend(result.timings.stages)
        return result

    def require_spaces(self, models: LoadedModels, request: EmbedRequest | RerankRequest) -> None:
        """Note the ids of the spaces of what the models make.

        Raises `VectorSpaceDiffersError` where the client has vectors of others.
        """
        spaces, context = models.spaces_of(request), self.context
        if context.if_vector_space:
            require_spaces(context.if_vector_space, spaces)
        context.vector_spaces |= spaces

    async def render(
        self, render: Callable[[], Iterable[Chunk]], media_type: str = JSON
    ) -> Response:
        """Render the response, off the event loop if much is held for it.

        What is beyond some megabytes is rendered while the client reads it.
        """
        began, context, threads = time.perf_counter(), self.context, self.service.render_threads
        create = partial(ChunkedResponse, render, self, threads, media_type)
        if context.answer.held < LARGE_ANSWER_BYTES:
            response = create()
        else:
            response = await asyncio.get_running_loop().run_in_executor(threads, create)
        context.stages.append(Stage("render", began, time.perf_counter()))
        return response


def time_limit(seconds: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """Raises `InferenceTimeoutError` where the block takes longer than `seconds`."""
    limit = f"{seconds:g} seconds (REQUEST_TIMEOUT)"
    message = f"the request took longer than {limit}: send fewer texts"
    return failing_with(partial(InferenceTimeoutError, message), seconds)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, for a request whose body has been read whole.

    If the client disconnects, cancels the work and raises `ClientGoneError`.
    """
    message = "the client left before its request was answered"
    async with failing_with(partial(ClientGoneError, message)) as scope:
        watching = asyncio.ensure_future(_end_when_it_leaves(request, scope))
        try:
            return await work
        finally:
            watching.cancel()


async def _end_when_it_leaves(request: Request, scope: asyncio.Timeout) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.reschedule(0)


def find_embedder(call: Call, role: Role | None = None) -> ServedModel:
    """The embedding model in the request's path, or else the default one, or that of `role`.

    Raises `InvalidRequestError` where the model in the path makes other kinds, or none.
    """
    catalogue = call.service.catalogue
    name = call.path_params.get("model")
    if name is None:
        return catalogue.embedder(None) if role is None else catalogue.with_role(role)
    model = catalogue.find(name)
    if model.role is Role.RERANKER or role not in {None, model.role}:
        raise InvalidRequestError(f"the model {model.name} does not make what is asked for here")
    return model


async def embed(
    call: Call, request: EmbedRequest, *, field: str, model: ServedModel, allowed: int = 0
) -> EmbeddingResult:
    """Embed the texts that are in the request's `field`; `model` makes the dense vectors.

    As many as `allowed` are never too many.
    """
    most = max(call.service.settings.max_sentences_per_request, allowed)
    check_texts(request.texts, field, most)
    try:
        return await embed_texts(call, request, model)
    except TextTooLongError as error:
        raise _of_field(error, "sentences", field) from None


async def embed_texts(
    call: Call, request: EmbedRequest, model: ServedModel | None
) -> EmbeddingResult:
    """Embed texts that have been checked; by default all models make vectors."""
    work, counter = call.service.engine.embedding.embed, call.service.metrics.sentences
    return await call.run(work, request, model, counter, sentences=len(request.texts))


async def rerank(
    call: Call, request: RerankRequest, model: ServedModel | None, field: str
) -> RerankResult:
    """Score the passages, which the request calls `field`.

    Late interaction has no probabilities: where `normalize` asks for them, its scores go through a
    sigmoid, which keeps the order.
    """
    check_passages(request.query, request.passages, field, call.service.settings)
    check_rerank_options(await call.lease(model), instruction=request.instruction)
    try:
        result = await score_passages(call, request, model)
    except TextTooLongError as error:
        raise _of_field(error, "passages", field) from None
    if result.parts is None or not request.normalize:
        return result
    return replace(result, scores=sigmoid(result.scores))


async def score_passages(
    call: Call, request: RerankRequest, model: ServedModel | None
) -> RerankResult:
    """Score passages that have been checked."""
    work, counter = call.service.engine.scoring.rerank, call.service.metrics.pairs
    return await call.run(work, request, model, counter, passages=len(request.passages))


def _of_field(error: TextTooLongError, ours: str, theirs: str) -> TextTooLongError:
    """The error for a text that is too long, in the request's own field."""
    problems = [
        each | {"pointer": each["pointer"].replace(f"/{ours}/", f"/{theirs}/")}
        for each in error.problems
    ]
    return TextTooLongError(str(error), problems)

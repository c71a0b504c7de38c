"""Runs the work of a request in the engine, within its deadline and while its client is connected.

Endpoints get a `Call`, which leases the models, runs the work and renders the response. `embed` and
`rerank` also check the texts and name the field of the dialect in errors.
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
from smart_embedder.requests import AnyRequest, EmbedRequest, ExtractRequest, RerankRequest
from smart_embedder.results import EmbeddingResult, ExtractionResult, RerankResult, Stage, sigmoid
from smart_embedder.vector_space import require_spaces

Result = TypeVar("Result")
WorkRequest = TypeVar("WorkRequest", EmbedRequest, RerankRequest, ExtractRequest)
WorkResult = TypeVar("WorkResult", EmbeddingResult, RerankResult, ExtractionResult)

# Rendering this many bytes of vectors takes three milliseconds, as JSON is three times as long.
LARGE_ANSWER_BYTES = 32_768


class Call(Request):
    """A request with its parsed body, which FastAPI validates by the endpoint's signature.

    `leases` are held until the request ends, at the latest at `deadline`. `leased` has the leased
    models by the name in the request; see `EngineCore.lease`.
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
        """Bytes that are not empty; FastAPI checks nothing else of them."""
        return b"parsed"

    async def json(self) -> Any:
        """The parsed body."""
        return self._value

    def forget_body(self) -> None:
        """Free the parsed body, which FastAPI would hold to the end; the endpoint has its texts."""
        if isinstance(self._value, dict):
            self._value.clear()

    @property
    def context(self) -> RequestContext:
        """The context of the request."""
        return context_of(self.scope)

    async def lease(self, model: ServedModel | None) -> LoadedModels:
        """Lease `model`, or the default models, until the request is answered.

        Waits and raises as `EngineCore.lease` does.
        """
        name = model.name if model else None
        if (leased := self.leased.get(name)) is not None:
            return leased
        seconds_left = self.service.settings.request_timeout
        if self.deadline is not None:
            seconds_left = max(0.0, self.deadline - asyncio.get_running_loop().time())
        lease = self.service.engine.lease(name, SHARE_FOR_LOADING * seconds_left)
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
        """Run `work` for this client, interactive or bulk as the request says.

        Adds `counts` to `counter`, and records them, tokens and stages for the log and the trace.
        """
        models, context = await self.lease(model), self.context
        self.forget_body()
        request = replace(
            request,
            is_bulk=is_bulk(self),
            client=context.client,
            client_weight=context.client_weight,
            charge=context.charge,
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

    def require_spaces(self, models: LoadedModels, request: AnyRequest) -> None:
        """Record the vector spaces of the response.

        Raises `VectorSpaceDiffersError` if the request requires others.
        """
        spaces, context = models.space_ids(request), self.context
        if context.if_vector_space:
            require_spaces(context.if_vector_space, spaces)
        context.vector_spaces |= spaces

    async def render(
        self, render: Callable[[], Iterable[Chunk]], media_type: str = JSON
    ) -> Response:
        """Render the response, outside the event loop if it is large.

        A response of more than a few megabytes is rendered while the client reads it.
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
    """Raise `InferenceTimeoutError` if the block takes longer than `seconds`."""
    limit = f"{seconds:g} seconds (REQUEST_TIMEOUT)"
    message = f"the request took longer than {limit}: send fewer texts"
    return failing_with(partial(InferenceTimeoutError, message), seconds)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work` for a request whose body has been read whole.

    If the client disconnects, cancels the work and raises `ClientGoneError`.
    """
    message = "the client left before its request was answered"
    async with failing_with(partial(ClientGoneError, message)) as scope:
        watching = asyncio.ensure_future(_expire_on_disconnect(request, scope))
        try:
            return await work
        finally:
            watching.cancel()


async def _expire_on_disconnect(request: Request, scope: asyncio.Timeout) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.reschedule(0)


def find_embedder(call: Call, role: Role | None = None) -> ServedModel:
    """The embedding model that the request's path names, or else the default one for `role`.

    Raises `InvalidRequestError` if the named model does not do the work of `role`, or of embedding.
    """
    catalogue = call.service.catalogue
    name = call.path_params.get("model")
    if name is None:
        return catalogue.embedder(None) if role is None else catalogue.with_role(role)
    model = catalogue.find(name)
    if not model.role.embeds or role not in {None, model.role}:
        raise InvalidRequestError(f"the model {model.name} does not support this endpoint")
    return model


async def embed(
    call: Call, request: EmbedRequest, *, field: str, model: ServedModel, allowed: int = 0
) -> EmbeddingResult:
    """Check and embed the texts of the request's `field`; `model` makes the dense vectors.

    At least `allowed` texts are accepted, whatever MAX_SENTENCES_PER_REQUEST says.
    """
    max_texts = max(call.service.settings.max_sentences_per_request, allowed)
    check_texts(request.texts, field, max_texts)
    try:
        return await embed_texts(call, request, model)
    except TextTooLongError as error:
        raise _rename_field(error, "sentences", field) from None


async def embed_texts(
    call: Call, request: EmbedRequest, model: ServedModel | None
) -> EmbeddingResult:
    """Embed texts that have been checked; with no `model` the default models make the vectors."""
    work, counter = call.service.engine.embedding.embed, call.service.metrics.sentences
    return await call.run(work, request, model, counter, sentences=len(request.texts))


async def rerank(
    call: Call, request: RerankRequest, model: ServedModel | None, field: str
) -> RerankResult:
    """Check and score the passages of the request's `field`.

    With `normalize`, scores of late interaction go through a sigmoid; their ranking stays. The
    engine normalizes the scores of rerankers.
    """
    check_passages(request.query, request.passages, field, call.service.settings)
    check_rerank_options(await call.lease(model), instruction=request.instruction)
    try:
        result = await score_passages(call, request, model)
    except TextTooLongError as error:
        raise _rename_field(error, "passages", field) from None
    if result.parts is None or not request.normalize:
        return result
    return replace(result, scores=sigmoid(result.scores))


async def score_passages(
    call: Call, request: RerankRequest, model: ServedModel | None
) -> RerankResult:
    """Score passages that have been checked."""
    work, counter = call.service.engine.scoring.rerank, call.service.metrics.pairs
    return await call.run(work, request, model, counter, passages=len(request.passages))


async def extract(
    call: Call, request: ExtractRequest, model: ServedModel, field: str = "texts"
) -> ExtractionResult:
    """Check the texts of the request's `field`, and find the spans of each."""
    settings, metrics = call.service.settings, call.service.metrics
    check_texts(request.texts, field, settings.max_sentences_per_request)
    work = call.service.engine.extraction.extract
    return await call.run(work, request, model, metrics.sentences, sentences=len(request.texts))


def _rename_field(error: TextTooLongError, native: str, field: str) -> TextTooLongError:
    """Point the error to the request's `field` instead of the `native` one."""
    problems = [
        problem | {"pointer": problem["pointer"].replace(f"/{native}/", f"/{field}/")}
        for problem in error.problems
    ]
    return TextTooLongError(str(error), problems)

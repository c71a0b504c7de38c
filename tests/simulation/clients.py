"""The clients: their requests, when they leave, and how slowly they read.

A request takes the path of the service without HTTP: the middleware that counts it, the handler's
time limit, lease and check for disconnects, the memory budget, and the engine.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from app.catalogue import Role, ServedModel
from app.context import NATIVE_EMBEDDINGS, RERANK, RequestContext
from app.error_responses import status_of
from app.errors import ClientGoneError
from app.handler import Call, cancel_on_disconnect, time_limit
from app.http_metrics import REASON_OF, Metrics
from app.middleware.limits import HeldMemory, MemoryBudget
from app.middleware.request_metrics import MeasureRequests, _outcome
from app.service import Service
from app.settings import Settings
from smart_embedder.core import EngineCore
from smart_embedder.errors import (
    LONGEST_RETRY_AFTER,
    DrainingError,
    InferenceError,
    InferenceTimeoutError,
    QueueFullError,
    SmartEmbedderError,
)
from smart_embedder.interface import LoadedModels
from smart_embedder.pipelines.reranking import fuse, score
from smart_embedder.requests import (
    DENSE,
    EmbedRequest,
    FusionWeights,
    Outputs,
    Purpose,
    RerankRequest,
    TruncationOptions,
)
from smart_embedder.results import EmbeddingResult, TextEmbedding
from tests.simulation.auditor import OWNER, Auditor, RequestBook
from tests.simulation.fakes import FakeEmbedder, FakeModel, number_of, score_of
from tests.simulation.virtual_time import Moments, VirtualLoop

_ANSWER_BYTES, _BODY_BYTES = 2**20, 2**14


def _served(model: str | None) -> ServedModel | None:
    return None if model is None else ServedModel(Role.EMBEDDER, (model,))


@dataclass(eq=False)
class World:
    """The parts of one run."""

    loop: VirtualLoop
    random: Random
    settings: Settings
    engine: EngineCore
    metrics: Metrics
    auditor: Auditor
    budget: MemoryBudget
    texts: list[str]
    names: list[str]
    moments: Moments
    tally: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    draining_since: float | None = None
    in_work: dict[str, set[RequestBook]] = field(default_factory=dict)
    measured: MeasureRequests = field(init=False)

    def __post_init__(self) -> None:
        endpoints = NATIVE_EMBEDDINGS, RERANK
        self.measured = MeasureRequests(_answer, self.metrics, endpoints)

    def count(self, what: str) -> None:
        self.tally[what] = self.tally.get(what, 0) + 1


@dataclass(eq=False)
class Client:
    """A client with a name, whose requests share the devices with those of others."""

    world: World
    name: str
    bulk_share: float

    async def embed(
        self,
        texts: list[str],
        *,
        model: str | None = None,
        leaves_after: float | None = None,
        reads_for: float = 0.0,
        truncate: bool = True,
        kinds: Outputs | None = None,
        answer_bytes: int = _ANSWER_BYTES,
    ) -> str:
        kinds = kinds or DENSE
        engine = self.world.engine

        async def work(call: Call) -> None:
            leased = await call.lease(_served(model))
            async with self._uses(leased):
                how = TruncationOptions(truncate=truncate)
                request = EmbedRequest(texts, kinds, truncation=how)
                result = await call.run(
                    engine.embedding.embed,
                    request,
                    _served(model),
                    self.world.metrics.sentences,
                    sentences=len(texts),
                )
                self._check_vectors(texts, kinds, result, leased)

        return await self._request(Purpose.EMBEDDING, work, leaves_after, reads_for, answer_bytes)

    async def rerank(
        self,
        query: str,
        passages: list[str],
        *,
        model: str | None = None,
        leaves_after: float | None = None,
    ) -> str:
        engine = self.world.engine

        async def work(call: Call) -> None:
            leased = await call.lease(_served(model))
            async with self._uses(leased):
                request = RerankRequest(query, passages)
                result = await call.run(
                    engine.scoring.rerank,
                    request,
                    _served(model),
                    self.world.metrics.pairs,
                    passages=len(passages),
                )
                expected = expected_scores(leased, query, passages)
                if result.scores != expected:
                    self.world.auditor.fail("own", f"scores {result.scores}, not {expected}")

        return await self._request(Purpose.RERANKING, work, leaves_after)

    def _is_bulk(self) -> bool:
        return self.world.random.random() < self.bulk_share

    @asynccontextmanager
    async def _uses(self, leased: LoadedModels) -> AsyncIterator[None]:
        """Report the lease of a model that may be unloaded to the auditor, in the block."""
        if leased == self.world.engine.loaded():
            yield
            return
        default = self.world.engine.loaded()
        model = leased.embedder if leased.reranker in {None, default.reranker} else leased.reranker
        self.world.auditor.leases(model)
        try:
            yield
        finally:
            self.world.auditor.releases(model)

    async def _request(
        self,
        purpose: Purpose,
        work: Callable[[Call], Coroutine[Any, Any, None]],
        leaves_after: float | None = None,
        reads_for: float = 0.0,
        answer_bytes: int = _ANSWER_BYTES,
    ) -> str:
        """Send a request; returns the code of its error, or `success`."""
        world = self.world
        loop, settings = world.loop, world.settings
        world.requests += 1
        endpoint = NATIVE_EMBEDDINGS if purpose is Purpose.EMBEDDING else RERANK
        context = RequestContext(str(world.requests), endpoint.path, endpoint, self.name)
        book = RequestBook(world.requests, context.client, purpose, loop.now, self._is_bulk())
        OWNER.set(book)
        answer = HeldMemory(world.budget, self.name, answer_bytes)
        context.answer = answer
        leaves = None if leaves_after is None else world.moments.rounded(leaves_after)
        turns = world.random.randint(0, 12) if world.moments.are_common else 0
        gone = _Departure(loop, leaves, turns)
        headers = [(b"priority", b"u=7")] if book.is_bulk else []
        request = Request({**_scope(context), "headers": headers}, gone.receive)
        service = cast(Service, SimpleNamespace(settings=settings, engine=world.engine))
        outcome = "success"
        others = world.in_work.setdefault(self.name, set())
        for concurrent in others | {book}:
            concurrent.is_only &= not others
        others.add(book)

        async def answered() -> None:
            nonlocal outcome
            try:
                answer.add_body(_BODY_BYTES)
                async with AsyncExitStack() as leases:
                    deadline = loop.time() + settings.request_timeout
                    call = Call(request, service, leases, deadline=deadline)
                    async with time_limit(settings.request_timeout):
                        await cancel_on_disconnect(request, work(call))
                    context.status = 200
            except SmartEmbedderError as error:
                outcome = context.error_code = error.code
                context.error_status = status_of(error)
                self._check_error(error, book)

        try:
            await world.measured(_scope(context, answered), _nothing, _nowhere)
            if loop.now > book.began + settings.request_timeout + 1e-3:
                world.auditor.fail("once", f"a request takes {loop.now - book.began:.3f} s")
            self._count(book, context, outcome)
            if outcome == "success" and reads_for:
                await asyncio.sleep(reads_for)
        finally:
            book.ended = True
            others.discard(book)
            answer.release()
            gone.forget()
        return outcome

    def _count(self, book: RequestBook, context: RequestContext, outcome: str) -> None:
        """Count the outcome, to compare it with the metrics at the end."""
        world, prefix = self.world, book.purpose.name
        if outcome in REASON_OF:
            world.count(f"{prefix} {REASON_OF[outcome]}")
        elif outcome == ClientGoneError.code:
            world.count("abandoned")
        else:
            world.count(f"{prefix} {_outcome(context.error_status or context.status)}")

    def _check_error(
        self,
        error: SmartEmbedderError,
        book: RequestBook | None = None,
    ) -> None:
        auditor, world = self.world.auditor, self.world
        retry = error.retry_after
        if retry is not None and not 1 <= retry <= LONGEST_RETRY_AFTER:
            auditor.fail("retry", f"{error.code} says Retry-After: {retry}")
        if isinstance(error, QueueFullError) and retry is None:
            auditor.fail("retry", "a full queue says no Retry-After")
        if book is None:
            return
        age = world.loop.now - book.began
        failed = [job_book for job_book in book.jobs if job_book.job._error is not None]
        if type(error) is InferenceError and not failed:
            auditor.fail("own", "a request fails by a forward that it had no part in")
        if isinstance(error, DrainingError) and world.draining_since is not None:
            began = max(book.began, world.draining_since)
            is_early = age > 0 and book.began < world.draining_since
            if is_early and world.loop.now < began + world.settings.shutdown_timeout - 1e-3:
                auditor.fail("drain", "an accepted request is refused before the time is over")
        is_late = isinstance(error, InferenceTimeoutError) and "REQUEST_TIMEOUT" in str(error)
        if is_late and age < world.settings.request_timeout - 1e-3:
            auditor.fail("deadline", f"a request is cut off after {age:.3f} s")

    def _check_vectors(
        self,
        texts: list[str],
        kinds: Outputs,
        result: EmbeddingResult,
        models: LoadedModels,
    ) -> None:
        if len(result.embeddings) != len(texts):
            self.world.auditor.fail("own", f"{len(result.embeddings)} results of {len(texts)}")
        model = cast(FakeEmbedder, models.embedder)
        tokens = 0
        for text, got in zip(texts, result.embeddings, strict=True):
            length = min(len(text), model.max_length)
            tokens += length
            if not _equal(got, model.vectors(number_of(text), length, kinds)):
                self.world.auditor.fail("own", f"the vectors of text {text[:9]} are {got}")
        if result.tokens != tokens:
            self.world.auditor.fail("own", f"{result.tokens} tokens, not {tokens}")


def expected_scores(models: LoadedModels, query: str, passages: list[str]) -> list[float]:
    if not models.late_interaction:
        number = cast(FakeModel, models.reranker).number
        return [score_of(number, number_of(query), number_of(passage)) for passage in passages]
    model = cast(FakeEmbedder, models.embedder)

    def vectors(text: str) -> TextEmbedding:
        return model.vectors(number_of(text), min(len(text), model.max_length), model.kinds)

    first = vectors(query)
    return [fuse(FusionWeights(), score(first, vectors(passage))) for passage in passages]


def _equal(got: TextEmbedding, expected: TextEmbedding) -> bool:
    for left, right in ((got.dense, expected.dense), (got.colbert, expected.colbert)):
        if (left is None) != (right is None):
            return False
        if left is not None and right is not None and left.tobytes() != right.tobytes():
            return False
    if got.sparse is None or expected.sparse is None:
        return got.sparse is expected.sparse
    return np.array_equal(got.sparse.indices, expected.sparse.indices)


class _Departure:
    """The connection of a client that leaves after some seconds and loop iterations, or stays."""

    def __init__(self, loop: VirtualLoop, seconds: float | None, turns: int) -> None:
        self._turns = turns
        self._left = loop.create_future()
        self._timer = None if seconds is None else loop.call_later(seconds, self._leave)

    def _leave(self) -> None:
        if not self._left.done():
            self._left.set_result(None)

    async def receive(self) -> Message:
        await asyncio.shield(self._left)
        for _ in range(self._turns):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    def forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._left.cancel()


def _scope(context: RequestContext, app: Callable[[], Awaitable[None]] | None = None) -> Scope:
    return {"type": "http", "state": {"context": context}, "app": app}


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await scope["app"]()


async def _nothing() -> Message:
    return {"type": "http.request"}


async def _nowhere(message: Message) -> None:
    return None

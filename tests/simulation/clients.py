"""The clients: their requests, and when they leave.

A request leases its models and calls the engine, as the service does, within REQUEST_TIMEOUT.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import numpy as np

from smart_embedder.core import EngineCore
from smart_embedder.errors import (
    LONGEST_RETRY_AFTER,
    DrainingError,
    InferenceError,
    QueueFullError,
    SmartEmbedderError,
)
from smart_embedder.interface import SHARE_FOR_LOADING, LoadedModels, Model
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


@dataclass(eq=False)
class World:
    """The parts of one run."""

    loop: VirtualLoop
    random: Random
    engine: EngineCore
    auditor: Auditor
    texts: list[str]
    moments: Moments
    request_timeout: float
    shutdown_timeout: float
    tally: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    draining_since: float | None = None
    in_work: dict[str, set[RequestBook]] = field(default_factory=dict)


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
        truncate: bool = True,
        kinds: Outputs = DENSE,
    ) -> str:
        async def work(book: RequestBook) -> None:
            async with self._lease(model) as leased:
                request = EmbedRequest(
                    texts,
                    kinds,
                    truncation=TruncationOptions(truncate=truncate),
                    client=self.name,
                    is_bulk=book.is_bulk,
                )
                result = await self.world.engine.embedding.embed(leased, request)
                self._check_vectors(texts, kinds, result, leased)

        return await self._request(Purpose.EMBEDDING, work, leaves_after)

    async def rerank(
        self,
        query: str,
        passages: list[str],
        *,
        model: str | None = None,
        leaves_after: float | None = None,
    ) -> str:
        async def work(book: RequestBook) -> None:
            async with self._lease(model) as leased:
                request = RerankRequest(query, passages, client=self.name, is_bulk=book.is_bulk)
                result = await self.world.engine.scoring.rerank(leased, request)
                expected = expected_scores(leased, query, passages)
                if result.scores != expected:
                    self.world.auditor.fail("own", f"scores {result.scores}, not {expected}")

        return await self._request(Purpose.RERANKING, work, leaves_after)

    @asynccontextmanager
    async def _lease(self, name: str | None) -> AsyncIterator[LoadedModels]:
        """Lease models, and report a model that may be unloaded to the auditor."""
        engine, auditor = self.world.engine, self.world.auditor
        seconds = SHARE_FOR_LOADING * self.world.request_timeout
        async with engine.lease(name, seconds) as leased:
            if name is None:
                yield leased
                return
            model: Model = leased.embedder
            if leased.reranker is not None and leased.reranker != engine.loaded().reranker:
                model = leased.reranker
            auditor.leases(model)
            try:
                yield leased
            finally:
                auditor.releases(model)

    async def _request(
        self,
        purpose: Purpose,
        work: Callable[[RequestBook], Coroutine[Any, Any, None]],
        leaves_after: float | None,
    ) -> str:
        """Send a request; returns the code of its error, or `success`, `timeout` or `left`."""
        world, loop = self.world, self.world.loop
        world.requests += 1
        is_bulk = world.random.random() < self.bulk_share
        book = RequestBook(world.requests, self.name, purpose, loop.now, is_bulk)
        others = world.in_work.setdefault(self.name, set())
        for concurrent in others | {book}:
            concurrent.is_only &= not others
        others.add(book)
        OWNER.set(book)
        task = loop.create_task(work(book))
        leaver = None
        if leaves_after is not None:
            leaver = loop.create_task(self._leave(task, world.moments.rounded(leaves_after)))
        outcome = "success"
        try:
            async with asyncio.timeout(world.request_timeout):
                await task
        except TimeoutError:
            outcome = "timeout"
        except asyncio.CancelledError:
            if leaver is None:
                raise
            outcome = "left"
        except SmartEmbedderError as error:
            outcome = error.code
            self._check_error(error, book)
        finally:
            book.ended = True
            others.discard(book)
            if leaver is not None:
                leaver.cancel()
        if loop.now > book.began + world.request_timeout + 1e-3:
            world.auditor.fail("once", f"a request takes {loop.now - book.began:.3f} s")
        key = f"{purpose.name} {outcome}"
        world.tally[key] = world.tally.get(key, 0) + 1
        return outcome

    async def _leave(self, task: "asyncio.Task[None]", seconds: float) -> None:
        """Cancel a request after some seconds and, at common moments, iterations of the loop."""
        await asyncio.sleep(seconds)
        common = self.world.moments.are_common
        for _ in range(self.world.random.randint(0, 12) if common else 0):
            await asyncio.sleep(0)
        task.cancel()

    def _check_error(self, error: SmartEmbedderError, book: RequestBook) -> None:
        auditor, world = self.world.auditor, self.world
        retry = error.retry_after
        if retry is not None and not 1 <= retry <= LONGEST_RETRY_AFTER:
            auditor.fail("retry", f"{error.code} says Retry-After: {retry}")
        if isinstance(error, QueueFullError) and retry is None:
            auditor.fail("retry", "a full queue says no Retry-After")
        failed = [job_book for job_book in book.jobs if job_book.job._error is not None]
        if type(error) is InferenceError and not failed:
            auditor.fail("own", "a request fails by a forward that it had no part in")
        draining_since = world.draining_since
        if isinstance(error, DrainingError) and draining_since is not None:
            is_early = book.began < min(draining_since, world.loop.now)
            if is_early and world.loop.now < draining_since + world.shutdown_timeout - 1e-3:
                auditor.fail("drain", "an accepted request is refused before the time is over")

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
    parts = [score(first, vectors(passage), by_product=False) for passage in passages]
    return [fuse(FusionWeights(), part) for part in parts]


def _equal(got: TextEmbedding, expected: TextEmbedding) -> bool:
    for left, right in ((got.dense, expected.dense), (got.colbert, expected.colbert)):
        if (left is None) != (right is None):
            return False
        if left is not None and right is not None and left.tobytes() != right.tobytes():
            return False
    if got.sparse is None or expected.sparse is None:
        return got.sparse is expected.sparse
    return np.array_equal(got.sparse.indices, expected.sparse.indices)

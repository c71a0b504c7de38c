"""Rerank requests: to jobs for a reranker, or for bge-m3's late interaction, and back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from app.engine.admission import Admission, Tokenized, timings_of
from app.engine.batcher import DEFAULT_URGENCY, weight_of
from app.engine.concurrency import ConcurrencyLimit
from app.engine.job import Job, Purpose
from app.engine.late_interaction import FusionWeights, score
from app.engine.loaded_models import LoadedModels
from app.engine.model import Embedder, Reranker
from app.engine.types import (
    Outputs,
    PartScores,
    RerankResult,
    TokenizedPair,
    TokenizedText,
    TokenSequence,
    Truncation,
)
from app.errors import RerankerDisabledError

_ALL_KINDS = Outputs(dense=True, sparse=True, colbert=True)
_NO_VECTORS = Outputs()


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """A query, the passages to score for it, and how.

    `normalize` makes probabilities of logits, `instruction` is for rerankers that read one, and
    `weights` is for late interaction. `urgency` and `client` are as in `Engine.embed`.
    """

    query: str
    passages: list[str]
    normalize: bool = False
    instruction: str | None = None
    weights: FusionWeights = field(default_factory=FusionWeights)
    urgency: int = DEFAULT_URGENCY
    client: str = ""


class RerankingPipeline:
    """Runs rerank requests through the queue; `time_limit` is for the forwards of one request."""

    def __init__(self, admission: Admission, inside: ConcurrencyLimit, time_limit: float) -> None:
        self._admission = admission
        self._inside = inside
        self._time_limit = time_limit

    async def run(self, models: LoadedModels, request: RerankRequest) -> RerankResult:
        """Score every passage; raises `RerankerDisabledError` where RERANKER_MODEL is none."""
        async with self._inside.hold(request.client):
            if models.late_interaction:
                return await self._interact(models.embedder, request)
            if models.reranker is None:
                # No Retry-After: only another setting changes this.
                raise RerankerDisabledError("reranking is switched off: RERANKER_MODEL is none")
            return await self._rerank(models.reranker, request)

    async def _rerank(self, model: Reranker, request: RerankRequest) -> RerankResult:
        started = time.perf_counter()
        call = partial(model.tokenize_pairs, request.query, request.passages, request.instruction)
        both = [request.query, *request.passages]
        pairs = await self._admission.tokenize(model, call, both, request.client)
        job = self._job(model, [pair.sequence for pair in pairs.value], request)
        scores = await self._finish(job)
        if request.normalize and model.scores_are_logits:
            scores = sigmoid(scores)
        return RerankResult(
            scores=scores,
            parts=None,
            truncations=_pair_truncations(model, pairs.value),
            tokens=sum(len(pair.sequence) for pair in pairs.value),
            timings=timings_of(started, tokenized=[pairs.stage], jobs=[job]),
        )

    async def _interact(self, model: Embedder, request: RerankRequest) -> RerankResult:
        started = time.perf_counter()
        both = [request.query, *request.passages]
        call = partial(model.tokenize, both)
        texts = await self._admission.tokenize(model, call, both, request.client)
        query, *passages = texts.value
        query_job = self._job(model, [query.ids], request, outputs=_ALL_KINDS)
        (query_embedding,) = await self._finish(query_job)
        job = self._job(
            model,
            [passage.ids for passage in passages],
            request,
            outputs=_ALL_KINDS,
            time_spent=query_job.inference_seconds,
            # In the device thread, so that the token vectors of a passage are freed with its batch.
            reduce=partial(score, query_embedding),
        )
        parts: list[PartScores] = await self._finish(job)
        return RerankResult(
            scores=[request.weights.fuse(part) for part in parts],
            parts=parts,
            truncations=_text_truncations(model, texts),
            tokens=sum(len(text.ids) for text in texts.value),
            timings=timings_of(started, tokenized=[texts.stage], jobs=[query_job, job]),
        )

    def _job(
        self,
        model: Embedder | Reranker,
        sequences: Sequence[TokenSequence],
        request: RerankRequest,
        *,
        outputs: Outputs = _NO_VECTORS,
        time_spent: float = 0.0,
        reduce: Callable[[Any], Any] | None = None,
    ) -> Job:
        return Job(
            model,
            sequences,
            outputs,
            purpose=Purpose.RERANKING,
            client=request.client,
            weight=weight_of(request.urgency),
            time_limit=self._time_limit,
            time_spent=time_spent,
            reduce=reduce,
        )

    async def _finish(self, job: Job) -> list[Any]:
        await self._admission.submit(job)
        (results,) = await self._admission.results(job)
        return results


def sigmoid(logits: list[float]) -> list[float]:
    """Probabilities in float32, without overflow for large values of either sign."""
    values = np.asarray(logits, dtype=np.float32)
    small = np.exp(-np.abs(values))
    probabilities: list[float] = np.where(
        values >= 0, 1 / (1 + small), small / (1 + small)
    ).tolist()
    return probabilities


def _pair_truncations(model: Reranker, pairs: list[TokenizedPair]) -> list[Truncation]:
    shortest = min(pairs, key=lambda pair: pair.query_kept)
    cuts = []
    if shortest.query_kept < shortest.query_tokens:
        cuts.append(Truncation("query", 0, model.name, shortest.query_kept, shortest.query_tokens))
    for index, pair in enumerate(pairs):
        if pair.passage_kept < pair.passage_tokens:
            kept, had = pair.passage_kept, pair.passage_tokens
            cuts.append(Truncation("passages", index, model.name, kept, had))
    return cuts


def _text_truncations(model: Embedder, texts: Tokenized[list[TokenizedText]]) -> list[Truncation]:
    return [
        Truncation(
            "passages" if place else "query",
            max(0, place - 1),
            model.name,
            model.max_length,
            text.original_tokens,
        )
        for place, text in enumerate(texts.value)
        if text.truncated
    ]

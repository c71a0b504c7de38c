"""Rerank requests: scores from a reranker, or from late interaction."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from app.engine.admission import Admission, timings_of
from app.engine.batcher import DEFAULT_URGENCY, weight_of
from app.engine.concurrency import ConcurrencyLimit
from app.engine.job import Job, Purpose
from app.engine.late_interaction import FusionWeights, score
from app.engine.loaded_models import LoadedModels
from app.engine.model import Embedder, Reranker
from app.engine.options import CUT_AT_END, TruncationOptions
from app.engine.truncation import pair_truncations, refuse_truncation, text_truncations
from app.engine.types import (
    Outputs,
    PartScores,
    RerankResult,
    TokenizedPair,
    TokenizedText,
    TokenSequence,
)
from app.errors import EmptyInputError, InvalidRequestError, RerankerDisabledError

_NO_VECTORS = Outputs()


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """A query and the passages to score for it; `query` may be a list of one for each passage.

    `normalize` turns logits into probabilities. `instruction` is for rerankers that read one, and
    `weights` for late interaction. `truncation` applies to passages. `urgency`, `client` and
    `model` are as in `Engine.embed`.
    """

    query: str | list[str]
    passages: list[str]
    normalize: bool = False
    instruction: str | None = None
    weights: FusionWeights = field(default_factory=FusionWeights)
    truncation: TruncationOptions = CUT_AT_END
    urgency: int = DEFAULT_URGENCY
    client: str = ""
    model: str | None = None

    def check(self) -> None:
        """Raise `EmptyInputError` or `InvalidRequestError` where there is nothing to score."""
        if not self.passages:
            raise EmptyInputError("there are no passages to score")
        if len(self.queries) != len(self.passages):
            raise InvalidRequestError("there must be one query, or one for each passage")
        if not all(query.strip() for query in self.places):
            raise EmptyInputError("the query is blank")

    @property
    def queries(self) -> list[str]:
        """The query of each passage."""
        query = self.query
        return [query] * len(self.passages) if isinstance(query, str) else query

    @property
    def places(self) -> dict[str, list[int]]:
        """The indices of each distinct query's passages, so that each query is tokenised once."""
        places: dict[str, list[int]] = {}
        for place, query in enumerate(self.queries):
            places.setdefault(query, []).append(place)
        return places


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
            if models.reranker.refusal is not None:
                raise RerankerDisabledError(models.reranker.refusal)
            return await self._rerank(models.reranker, request)

    async def _rerank(self, model: Reranker, request: RerankRequest) -> RerankResult:
        started = time.perf_counter()
        call = partial(_tokenize_pairs, model, request)
        both = [*request.places, *request.passages]
        pairs = await self._admission.tokenize(model, call, both, request.client)
        truncations = pair_truncations(model, pairs.value, request.truncation.side)
        if not request.truncation.truncate:
            refuse_truncation(truncations)
        job = self._job(model, [pair.sequence for pair in pairs.value], request)
        scores = await self._admission.run(job)
        if request.normalize and model.scores_are_logits:
            scores = sigmoid(scores)
        return RerankResult(
            scores=scores,
            parts=None,
            truncations=truncations,
            tokens=sum(len(pair.sequence) for pair in pairs.value),
            timings=timings_of(started, tokenized=[pairs.stage], jobs=[job]),
        )

    async def _interact(self, model: Embedder, request: RerankRequest) -> RerankResult:
        started = time.perf_counter()
        kinds = replace(model.kinds, states=False)
        request.weights.require_one_of(kinds)
        both = [*request.places, *request.passages]
        call = partial(_tokenize_apart, model, request)
        texts = await self._admission.tokenize(model, call, both, request.client)
        queries, passages = texts.value[: len(request.places)], texts.value[len(request.places) :]
        truncations = [
            *text_truncations(model, queries, "query", "right"),
            *text_truncations(model, passages, "passages", request.truncation.side),
        ]
        if not request.truncation.truncate:
            refuse_truncation(truncations)
        query_job = self._job(model, [each.ids for each in queries], request, outputs=kinds)
        embeddings = dict(zip(request.places, await self._admission.run(query_job), strict=True))
        query_of = [embeddings[query] for query in request.queries]
        job = self._job(
            model,
            [passage.ids for passage in passages],
            request,
            outputs=kinds,
            time_spent=query_job.inference_seconds,
            # In the device thread, so that the token vectors of a passage are freed with its batch.
            reduce=lambda place, passage: score(query_of[place], passage),
        )
        parts: list[PartScores] = await self._admission.run(job)
        return RerankResult(
            scores=[request.weights.fuse(part) for part in parts],
            parts=parts,
            truncations=truncations,
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
        reduce: Callable[[int, Any], Any] | None = None,
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


def _tokenize_pairs(model: Reranker, request: RerankRequest) -> list[TokenizedPair]:
    """Tokenise each passage with its query, in the order of the passages."""
    pairs: dict[int, TokenizedPair] = {}
    for query, places in request.places.items():
        passages = [request.passages[place] for place in places]
        own = model.tokenize_pairs(query, passages, request.instruction, request.truncation)
        pairs |= zip(places, own, strict=True)
    return [pairs[place] for place in range(len(request.passages))]


def _tokenize_apart(model: Embedder, request: RerankRequest) -> list[TokenizedText]:
    """The queries, then the passages, for which alone the side of the cut is."""
    queries = model.tokenize([*request.places], input_type="query")
    passages = model.tokenize(
        request.passages, truncation=request.truncation, input_type="document"
    )
    return queries + passages


def sigmoid(logits: list[float]) -> list[float]:
    """Probabilities in float32, without overflow for large values of either sign."""
    values = np.asarray(logits, dtype=np.float32)
    small = np.exp(-np.abs(values))
    probabilities: list[float] = np.where(
        values >= 0, 1 / (1 + small), small / (1 + small)
    ).tolist()
    return probabilities

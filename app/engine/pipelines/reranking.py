"""Rerank requests: scores from a reranker, or from late interaction."""

import time
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from app.engine.admission.admission import timings_of
from app.engine.admission.truncation import pair_truncations, text_truncations
from app.engine.loaded_models import LoadedModels
from app.engine.model import Embedder, Reranker
from app.engine.options import Side
from app.engine.pipelines.late_interaction import FusionWeights, score
from app.engine.pipelines.scoring import ScoringPipeline, ScoringRequest
from app.engine.scheduling.job import Job
from app.engine.types import (
    Outputs,
    PartScores,
    RerankResult,
    TokenizedPair,
    TokenizedText,
    Truncation,
)
from app.errors import EmptyInputError, InvalidRequestError, RerankerDisabledError


@dataclass(frozen=True, slots=True)
class RerankRequest(ScoringRequest):
    """A query and the passages to score for it; `query` may be a list of one for each passage.

    `normalize` turns logits into probabilities. `instruction` is for rerankers that read one, and
    `weights` for late interaction. `truncation` applies to passages.
    """

    query: str | list[str]
    passages: list[str]
    normalize: bool = False
    instruction: str | None = None
    weights: FusionWeights = field(default_factory=FusionWeights)

    def check(self) -> None:
        """Raise `EmptyInputError` or `InvalidRequestError` where there is nothing to score."""
        if not self.passages:
            raise EmptyInputError("there are no passages to score")
        if len(self.queries) != len(self.passages):
            raise InvalidRequestError("there must be one query, or one for each passage")
        if not all(query.strip() for query in self.passages_by_query):
            raise EmptyInputError("the query is blank")

    @property
    def queries(self) -> list[str]:
        """The query of each passage."""
        query = self.query
        return [query] * len(self.passages) if isinstance(query, str) else query

    @property
    def passages_by_query(self) -> dict[str, list[int]]:
        """The indices of each distinct query's passages, so that each query is tokenised once."""
        indices: dict[str, list[int]] = {}
        for index, query in enumerate(self.queries):
            indices.setdefault(query, []).append(index)
        return indices

    @property
    def texts(self) -> list[str]:
        """Each distinct query, and every passage."""
        return [*self.passages_by_query, *self.passages]


@dataclass(frozen=True, slots=True)
class _SeparateTexts:
    """The distinct queries and the passages of a request, each tokenised by itself."""

    queries: list[TokenizedText]
    passages: list[TokenizedText]

    def truncations(self, model: Embedder, side: Side) -> list[Truncation]:
        """The texts that were cut, passages from `side`."""
        return [
            *text_truncations(model, self.queries, "query", "right"),
            *text_truncations(model, self.passages, "passages", side),
        ]


class RerankingPipeline(ScoringPipeline):
    """Runs rerank requests through the queue."""

    async def run(self, models: LoadedModels, request: RerankRequest) -> RerankResult:
        """Score every passage; raises `RerankerDisabledError` where RERANKER_MODEL is none."""
        async with self._limit.hold(request.client):
            if models.late_interaction:
                return await self._rerank_by_vectors(models.embedder, request)
            if models.reranker is None:
                # No Retry-After: only another setting changes this.
                raise RerankerDisabledError("reranking is switched off: RERANKER_MODEL is none")
            if models.reranker.refusal is not None:
                raise RerankerDisabledError(models.reranker.refusal)
            return await self._rerank(models.reranker, request)

    async def _rerank(self, model: Reranker, request: RerankRequest) -> RerankResult:
        started = time.perf_counter()
        call = partial(_tokenize_pairs, model, request)
        pairs = await self._admission.tokenize(model, call, request.texts, request.client)
        truncations = pair_truncations(model, pairs.value, request.truncation.side)
        request.check_truncations(truncations)
        job = self._job(model, [pair.sequence for pair in pairs.value], Outputs(), request)
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

    async def _rerank_by_vectors(self, model: Embedder, request: RerankRequest) -> RerankResult:
        started = time.perf_counter()
        kinds = replace(model.kinds, states=False)
        request.weights.require_one_of(kinds)
        call = partial(_tokenize_separately, model, request)
        tokenized = await self._admission.tokenize(model, call, request.texts, request.client)
        texts = tokenized.value
        truncations = texts.truncations(model, request.truncation.side)
        request.check_truncations(truncations)
        parts, jobs = await self._score_vectors(model, texts, kinds, request)
        return RerankResult(
            scores=[request.weights.fuse(part) for part in parts],
            parts=parts,
            truncations=truncations,
            tokens=sum(len(text.ids) for text in (*texts.queries, *texts.passages)),
            timings=timings_of(started, tokenized=[tokenized.stage], jobs=jobs),
        )

    async def _score_vectors(
        self, model: Embedder, texts: _SeparateTexts, kinds: Outputs, request: RerankRequest
    ) -> tuple[list[PartScores], list[Job]]:
        """Embed the queries, then score each passage; return the scores, and both jobs."""
        query_job = self._job(model, [text.ids for text in texts.queries], kinds, request)
        embeddings = await self._admission.run(query_job)
        by_query = dict(zip(request.passages_by_query, embeddings, strict=True))
        query_of = [by_query[query] for query in request.queries]
        job = self._job(
            model,
            [text.ids for text in texts.passages],
            kinds,
            request,
            time_spent=query_job.inference_seconds,
            # In the device thread, so that the token vectors of a passage are freed with its batch.
            reduce=lambda index, passage: score(query_of[index], passage),
        )
        return await self._admission.run(job), [query_job, job]


def _tokenize_pairs(model: Reranker, request: RerankRequest) -> list[TokenizedPair]:
    """Tokenise each passage with its query, in the order of the passages."""
    pairs: dict[int, TokenizedPair] = {}
    for query, indices in request.passages_by_query.items():
        passages = [request.passages[index] for index in indices]
        tokenized = model.tokenize_pairs(query, passages, request.instruction, request.truncation)
        pairs |= zip(indices, tokenized, strict=True)
    return [pairs[index] for index in range(len(request.passages))]


def _tokenize_separately(model: Embedder, request: RerankRequest) -> _SeparateTexts:
    """Tokenise the queries, and the passages, which alone `request.truncation` applies to."""
    return _SeparateTexts(
        model.tokenize([*request.passages_by_query], input_type="query"),
        model.tokenize(request.passages, truncation=request.truncation, input_type="document"),
    )


def sigmoid(logits: list[float]) -> list[float]:
    """Probabilities in float32, without overflow for large values of either sign."""
    values = np.asarray(logits, dtype=np.float32)
    small = np.exp(-np.abs(values))
    probabilities: list[float] = np.where(
        values >= 0, 1 / (1 + small), small / (1 + small)
    ).tolist()
    return probabilities

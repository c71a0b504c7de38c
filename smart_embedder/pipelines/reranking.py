"""Reranking, by a reranker or by late interaction."""

import time
from functools import partial

import numpy as np

from smart_embedder.errors import InvalidRequestError, RerankerDisabledError
from smart_embedder.interface import Embedder, LoadedModels, Reranker
from smart_embedder.interrupts import run_preempting_call
from smart_embedder.pipelines.embedding import TOKEN_ID_BYTES, vector_bytes
from smart_embedder.pipelines.validation import (
    check_reranking,
    check_truncations,
    pair_truncations,
    text_truncations,
)
from smart_embedder.requests import FusionWeights, Outputs, Purpose, RerankRequest
from smart_embedder.results import (
    FloatArray,
    PartScores,
    RerankResult,
    TextEmbedding,
    sigmoid,
)
from smart_embedder.scheduling.admission import Admission, ConcurrencyLimit
from smart_embedder.scheduling.job import Job, timings_of

# 4 MiB of them.
_MOST_PRODUCTS = 1 << 20


def score(query: TextEmbedding, passage: TextEmbedding) -> PartScores:
    """The scores of one passage by the kinds of vectors that both have."""
    dense = sparse = colbert = None
    if query.dense is not None and passage.dense is not None:
        dense = float(query.dense @ passage.dense)
    if query.sparse is not None and passage.sparse is not None:
        own, other = query.sparse, passage.sparse
        _, left, right = np.intersect1d(
            own.indices, other.indices, assume_unique=True, return_indices=True
        )
        sparse = float(own.values[left] @ other.values[right])
    if query.colbert is not None and passage.colbert is not None:
        colbert = _colbert_score(query.colbert, passage.colbert)
    return PartScores(dense, sparse, colbert)


def _colbert_score(query: FloatArray, passage: FloatArray) -> float:
    """The mean, over the query vectors, of the best product with a passage vector.

    Of long texts the products are made for some query vectors at a time: those of two texts of
    8,192 tokens would take 256 MiB, and hold the device for a second.
    """
    rows = max(1, _MOST_PRODUCTS // max(1, len(passage)))
    best = []
    for start in range(0, len(query), rows):
        run_preempting_call()
        # Along the first axis NumPy takes the maximum of whole rows at once.
        best.append((passage @ query[start : start + rows].T).max(axis=0))
    return float(np.concatenate(best).mean())


def fuse(weights: FusionWeights, scores: PartScores) -> float:
    """The weighted mean of the scores that are not None."""
    parts = (
        (weights.dense, scores.dense),
        (weights.sparse, scores.sparse),
        (weights.colbert, scores.colbert),
    )
    counted = [(weight, part) for weight, part in parts if part is not None]
    return sum(weight * part for weight, part in counted) / sum(weight for weight, _ in counted)


class ScoringPipeline:
    """Serves what `limit` admits; the forwards of one request may take `time_limit` seconds."""

    def __init__(self, admission: Admission, limit: ConcurrencyLimit, time_limit: float) -> None:
        self._admission = admission
        self._limit = limit
        self._time_limit = time_limit

    async def rerank(self, models: LoadedModels, request: RerankRequest) -> RerankResult:
        """Score every passage; see `EngineCore.rerank`."""
        check_reranking(request)
        async with self._admission.accepted.scope(), self._limit.hold(request.client):
            if models.late_interaction:
                return await self._rerank_by_vectors(models.embedder, request)
            if models.reranker is None:
                # No Retry-After: only another setting changes this.
                raise RerankerDisabledError("reranking is switched off: RERANKER_MODEL is none")
            return await self._rerank(models.reranker, request)

    async def _rerank(self, model: Reranker, request: RerankRequest) -> RerankResult:
        started = time.perf_counter()
        call = partial(
            model.tokenize_pairs,
            request.query,
            request.passages,
            request.instruction,
            request.truncation,
        )
        pairs, stage = await self._admission.tokenize(model, call, request.texts, request.client)
        truncations = pair_truncations(model, pairs, request.truncation.side)
        check_truncations(truncations, request.truncation)
        tokens = pairs[0].query_kept + sum([pair.passage_kept for pair in pairs])
        request.answer.need(TOKEN_ID_BYTES * tokens, *_tokens_needed(tokens))
        sequences = [pair.sequence for pair in pairs]
        job = self._make_job(request)(model, sequences, Outputs())
        scores = await self._admission.run(job)
        if request.normalize and model.scores_are_logits:
            scores = sigmoid(scores)
        timings = timings_of(started, tokenized=[stage], jobs=[job])
        return RerankResult(scores, None, truncations, sum(map(len, sequences)), timings)

    async def _rerank_by_vectors(self, model: Embedder, request: RerankRequest) -> RerankResult:
        """Embed the query, then score each passage in the device thread."""
        started = time.perf_counter()
        kinds, weights = model.kinds, request.weights
        by_kind = {"dense": weights.dense, "sparse": weights.sparse, "colbert": weights.colbert}
        if not any(weight and getattr(kinds, kind) for kind, weight in by_kind.items()):
            raise InvalidRequestError(
                "one of the weights must be above 0 of the kinds of vectors that the model makes"
            )
        ((query,), passages), stage = await self._admission.tokenize(
            model,
            lambda: (
                model.tokenize([request.query], input_type="query"),
                model.tokenize(
                    request.passages, truncation=request.truncation, input_type="document"
                ),
            ),
            request.texts,
            request.client,
        )
        truncations = [
            *text_truncations(model, [query], "query", "right"),
            *text_truncations(model, passages, "passages", request.truncation.side),
        ]
        check_truncations(truncations, request.truncation)
        tokens = sum(len(text.ids) for text in (query, *passages))
        size = TOKEN_ID_BYTES * tokens + vector_bytes(model, kinds, [len(query.ids)])
        request.answer.need(size, *_tokens_needed(tokens))
        make_job = self._make_job(request)
        of_query = make_job(model, [query.ids], kinds)
        (embedded,) = await self._admission.run(of_query)
        of_passages = make_job(
            model,
            [text.ids for text in passages],
            kinds,
            time_spent=of_query.inference_seconds,
            # There, a passage's token vectors are freed with its batch.
            reduce=partial(score, embedded),
        )
        parts = await self._admission.run(of_passages)
        scores = [fuse(weights, part) for part in parts]
        timings = timings_of(started, tokenized=[stage], jobs=[of_query, of_passages])
        return RerankResult(scores, parts, truncations, tokens, timings)

    def _make_job(self, request: RerankRequest) -> "partial[Job]":
        """A `Job` of this request, of what it is called with."""
        return partial(
            Job,
            purpose=Purpose.RERANKING,
            client=request.client,
            is_bulk=request.is_bulk,
            time_limit=self._time_limit,
        )


def _tokens_needed(tokens: int) -> tuple[str, str]:
    """What needs memory in a request of so many tokens, and what to do about it."""
    return f"these {tokens} tokens", "send fewer texts or shorter ones"

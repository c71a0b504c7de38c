"""Requests for scores: reranking by a reranker or by late interaction, and classification."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from smart_embedder.engine.checks import (
    check_reranking,
    check_truncations,
    pair_truncations,
    text_truncations,
)
from smart_embedder.engine.devices.thread import run_preempting_call
from smart_embedder.engine.model import Classifier, Embedder, LoadedModels, Reranker
from smart_embedder.engine.records import (
    ClassificationRequest,
    ClassificationResult,
    FloatArray,
    Outputs,
    PartScores,
    RerankRequest,
    RerankResult,
    ScoringRequest,
    TextEmbedding,
    TokenizedPair,
    TokenSequence,
)
from smart_embedder.engine.requests.embedding import TOKEN_ID_BYTES, vector_bytes
from smart_embedder.engine.scheduling.admission import Admission, timings_of
from smart_embedder.engine.scheduling.fairness import ConcurrencyLimit
from smart_embedder.engine.scheduling.job import Job, Purpose
from smart_embedder.errors import EmptyInputError, InvalidRequestError, RerankerDisabledError

# 4 MiB of them.
_MOST_PRODUCTS = 1 << 20
# The vectors of a group of queries hold at most this fraction of what an answer may hold.
_LEAST_GROUPS = 4
_LOGIT_BYTES = 4

Reduce = Callable[[int, Any], Any]


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


class ScoringPipeline:
    """Serves what `limit` admits; the forwards of one request may take `time_limit` seconds."""

    def __init__(self, admission: Admission, limit: ConcurrencyLimit, time_limit: float) -> None:
        self._admission = admission
        self._limit = limit
        self._time_limit = time_limit

    async def rerank(self, models: LoadedModels, request: RerankRequest) -> RerankResult:
        """Score every passage; see `Engine.rerank`."""
        check_reranking(request)
        async with self._admission.accepted.scope(), self._limit.hold(request.client):
            if models.late_interaction:
                return await self._rerank_by_vectors(models.embedder, request)
            if models.reranker is None:
                # No Retry-After: only another setting changes this.
                raise RerankerDisabledError("reranking is switched off: RERANKER_MODEL is none")
            if models.reranker.refusal is not None:
                raise RerankerDisabledError(models.reranker.refusal)
            return await self._rerank(models.reranker, request)

    async def classify(
        self, models: LoadedModels, request: ClassificationRequest
    ) -> ClassificationResult:
        """The logits of every input; see `Engine.classify`."""
        if not request.inputs:
            raise EmptyInputError("there are no texts to classify")
        model = models.reranker
        if model is None:
            raise RerankerDisabledError(
                "there is no model with labels here: RERANKER_MODEL names a cross-encoder"
            )
        if not isinstance(model, Classifier):
            raise InvalidRequestError(
                f"{model.name} has no labels: only a cross-encoder as RERANKER_MODEL has"
            )
        async with self._admission.accepted.scope(), self._limit.hold(request.client):
            started = time.perf_counter()
            texts, stage = await self._admission.tokenize(
                model,
                lambda: [
                    model.tokenize_input(*each, request.truncation) for each in request.inputs
                ],
                request.texts,
                request.client,
            )
            truncations = text_truncations(model, texts, "inputs", request.truncation.side)
            check_truncations(truncations, request.truncation)
            sequences = [text.ids for text in texts]
            tokens = sum(map(len, sequences))
            request.answer.need(
                TOKEN_ID_BYTES * tokens + _LOGIT_BYTES * len(model.labels) * len(sequences),
                f"the labels of these {len(sequences)} inputs",
                "send fewer inputs or shorter ones",
            )
            job = self._make_job(request)(model, sequences, Outputs(logits=True))
            logits = await self._admission.run(job)
        timings = timings_of(started, tokenized=[stage], jobs=[job])
        return ClassificationResult(model.labels, logits, truncations, tokens, timings)

    async def _rerank(self, model: Reranker, request: RerankRequest) -> RerankResult:
        started = time.perf_counter()
        by_query = request.passages_by_query
        call = partial(_tokenize_pairs, model, request)
        pairs, stage = await self._admission.tokenize(model, call, request.texts, request.client)
        truncations = pair_truncations(model, pairs, request.truncation.side)
        check_truncations(truncations, request.truncation)
        tokens = sum([pairs[passages[0]].query_kept for passages in by_query.values()])
        tokens += sum([pair.passage_kept for pair in pairs])
        request.answer.need(TOKEN_ID_BYTES * tokens, *_tokens_needed(tokens))
        sequences = [pair.sequence for pair in pairs]
        job = self._make_job(request)(model, sequences, Outputs())
        scores = await self._admission.run(job)
        if request.normalize and model.scores_are_logits:
            scores = sigmoid(scores)
        timings = timings_of(started, tokenized=[stage], jobs=[job])
        return RerankResult(scores, None, truncations, sum(map(len, sequences)), timings)

    async def _rerank_by_vectors(self, model: Embedder, request: RerankRequest) -> RerankResult:
        """Embed the queries, then score each passage in the device thread.

        Queries whose vectors would hold much of what they may are taken in several groups.
        """
        started = time.perf_counter()
        kinds, weights = replace(model.kinds, states=False), request.weights
        by_kind = {"dense": weights.dense, "sparse": weights.sparse, "colbert": weights.colbert}
        if not any(weight and getattr(kinds, kind) for kind, weight in by_kind.items()):
            raise InvalidRequestError(
                "one of the weights must be above 0 of the kinds of vectors that the model makes"
            )
        by_query = list(request.passages_by_query.values())
        (queries, passages), stage = await self._admission.tokenize(
            model,
            lambda: (
                model.tokenize([*request.passages_by_query], input_type="query"),
                model.tokenize(
                    request.passages, truncation=request.truncation, input_type="document"
                ),
            ),
            request.texts,
            request.client,
        )
        truncations = [
            *text_truncations(model, queries, "query", "right"),
            *text_truncations(model, passages, "passages", request.truncation.side),
        ]
        check_truncations(truncations, request.truncation)
        sizes = [vector_bytes(model, kinds, [len(text.ids)]) for text in queries]
        tokens = sum(len(text.ids) for text in (*queries, *passages))
        groups = _groups(sizes, request.answer.allowed // _LEAST_GROUPS)
        largest = max(sum(sizes[query] for query in group) for group in groups)
        request.answer.need(TOKEN_ID_BYTES * tokens + largest, *_tokens_needed(tokens))
        parts: dict[int, PartScores] = {}
        jobs, make_job = list[Job](), self._make_job(request)

        async def compute(ids: Sequence[TokenSequence], reduce: Reduce | None = None) -> list[Any]:
            spent = sum(job.inference_seconds for job in jobs)
            job = make_job(model, ids, kinds, time_spent=spent, reduce=reduce)
            results = await self._admission.run(job)
            job.forget()
            jobs.append(job)
            return results

        for group in groups:
            pairs = [(passage, query) for query in group for passage in by_query[query]]
            vectors = await compute([queries[query].ids for query in group])
            embedded = dict(zip(group, vectors, strict=True))
            # There, a passage's token vectors are freed with its batch.
            score_each = partial(_score_for, [embedded[query] for _, query in pairs])
            found = await compute([passages[passage].ids for passage, _ in pairs], score_each)
            parts |= zip([passage for passage, _ in pairs], found, strict=True)
        ordered = [parts[index] for index in range(len(passages))]
        scores = [weights.fuse(part) for part in ordered]
        timings = timings_of(started, tokenized=[stage], jobs=jobs)
        return RerankResult(scores, ordered, truncations, tokens, timings)

    def _make_job(self, request: ScoringRequest) -> "partial[Job]":
        """A `Job` of this request, of what it is called with."""
        return partial(
            Job,
            purpose=Purpose.RERANKING,
            client=request.client,
            is_bulk=request.is_bulk,
            time_limit=self._time_limit,
        )


def _score_for(queries: list[TextEmbedding], index: int, passage: TextEmbedding) -> PartScores:
    return score(queries[index], passage)


def _groups(sizes: list[int], most: int) -> list[list[int]]:
    """The indices of `sizes` in groups of together at most `most`; a larger one is alone."""
    groups: list[list[int]] = []
    left = 0
    for index, size in enumerate(sizes):
        if size > left or not groups:
            groups.append([])
            left = most
        groups[-1].append(index)
        left -= size
    return groups


def _tokens_needed(tokens: int) -> tuple[str, str]:
    """What needs memory in a request of so many tokens, and what to do about it."""
    return f"these {tokens} tokens", "send fewer texts or shorter ones"


def _tokenize_pairs(model: Reranker, request: RerankRequest) -> list[TokenizedPair]:
    """Tokenise each passage with its query, in the order of the passages."""
    pairs: dict[int, TokenizedPair] = {}
    for query, indices in request.passages_by_query.items():
        passages = [request.passages[index] for index in indices]
        tokenized = model.tokenize_pairs(query, passages, request.instruction, request.truncation)
        pairs |= zip(indices, tokenized, strict=True)
    return [pairs[index] for index in range(len(request.passages))]


def sigmoid(logits: list[float]) -> list[float]:
    """Probabilities in float32, without overflow for large values of either sign."""
    exact = np.exp(-np.logaddexp(0, -np.asarray(logits, np.float64)))
    probabilities: list[float] = exact.astype(np.float32).tolist()
    return probabilities

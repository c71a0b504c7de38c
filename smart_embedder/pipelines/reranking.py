"""Reranking requests: score passages with a reranker or by late interaction."""

import time
from functools import partial
from typing import cast

import numpy as np

from smart_embedder.errors import InvalidRequestError, RerankerDisabledError
from smart_embedder.interface import Embedder, LoadedModels, Reranker
from smart_embedder.interrupts import run_preempting_call
from smart_embedder.pipelines.embedding import (
    TOKEN_ID_BYTES,
    count_image_bytes,
    count_vector_bytes,
)
from smart_embedder.pipelines.validation import (
    check_images,
    check_reranking,
    check_truncations,
    pair_truncations,
    text_truncations,
)
from smart_embedder.requests import FusionWeights, Outputs, Purpose, RerankRequest, with_memory
from smart_embedder.results import (
    FloatArray,
    PartScores,
    RerankResult,
    TextEmbedding,
    rank,
    sigmoid,
)
from smart_embedder.scheduling.admission import Admission, ConcurrencyLimit
from smart_embedder.scheduling.job import Job, timings_of

# Products of token vectors at a time: 4 MiB in float32.
_MAX_PRODUCTS = 1 << 20
_MIN_NORM = 1e-12


def score(query: TextEmbedding, passage: TextEmbedding, *, by_product: bool = True) -> PartScores:
    """Score a passage by each kind of vectors that the query and the passage have.

    The dense score is the cosine, or with `by_product` the product of the vectors.
    """
    dense = sparse = colbert = None
    if query.dense is not None and passage.dense is not None:
        dense = float(query.dense @ passage.dense)
        if not by_product:
            norms = np.linalg.norm(query.dense) * np.linalg.norm(passage.dense)
            dense /= max(float(norms), _MIN_NORM)
    if query.sparse is not None and passage.sparse is not None:
        _, in_query, in_passage = np.intersect1d(
            query.sparse.indices, passage.sparse.indices, assume_unique=True, return_indices=True
        )
        sparse = float(query.sparse.values[in_query] @ passage.sparse.values[in_passage])
    if query.colbert is not None and passage.colbert is not None:
        colbert = _colbert_score(query.colbert, passage.colbert)
    return PartScores(dense, sparse, colbert)


def _colbert_score(query: FloatArray, passage: FloatArray) -> float:
    """Return the mean, over the query vectors, of the highest product with a passage vector.

    The products of long texts are computed for some query vectors at a time. For two texts of 8,192
    tokens, all products would take 256 MiB, and block the device for a second.
    """
    rows = max(1, _MAX_PRODUCTS // max(1, len(passage)))
    highest = []
    for start in range(0, len(query), rows):
        run_preempting_call()
        # Along the first axis, NumPy computes the maximum of whole rows at once.
        highest.append((passage @ query[start : start + rows].T).max(axis=0))
    return float(np.concatenate(highest).mean())


def fuse(weights: FusionWeights, scores: PartScores) -> float:
    """Return the weighted mean of the scores that are not None."""
    parts = (
        (weights.dense, scores.dense),
        (weights.sparse, scores.sparse),
        (weights.colbert, scores.colbert),
    )
    present = [(weight, part) for weight, part in parts if part is not None]
    return sum(weight * part for weight, part in present) / sum(weight for weight, _ in present)


class ScoringPipeline:
    """Serves reranking requests, each with a permit of `limit` and `time_limit` seconds."""

    def __init__(self, admission: Admission, limit: ConcurrencyLimit, time_limit: float) -> None:
        self._admission = admission
        self._limit = limit
        self._make_job = partial(Job.of, purpose=Purpose.RERANKING, time_limit=time_limit)

    async def rerank(self, models: LoadedModels, request: RerankRequest) -> RerankResult:
        """Score every passage; see `EngineCore.rerank`."""
        check_reranking(request)
        async with self._admission.accepted.scope(), self._limit.hold(request.client):
            if models.late_interaction:
                return await self._rerank_by_vectors(models.embedder, request)
            if models.reranker is None:
                # No Retry-After, as waiting does not help.
                raise RerankerDisabledError("reranking is switched off: RERANKER_MODEL is none")
            return await self._rerank(models.reranker, request)

    async def _rerank(self, model: Reranker, request: RerankRequest) -> RerankResult:
        started = time.perf_counter()
        check_images(request.passages, model)
        call = partial(
            model.tokenize_pairs,
            request.query,
            cast("list[str]", request.passages),
            request.instruction,
            request.truncation,
        )
        pairs, stage = await self._admission.tokenize(model, call, request.texts, request.client)
        truncations = pair_truncations(model, pairs, request.truncation.side)
        check_truncations(truncations, request.truncation)
        tokens = pairs[0].query.kept + sum([pair.passage.kept for pair in pairs])
        request.answer.reserve(TOKEN_ID_BYTES * tokens, *_memory_error_texts(tokens))
        sequences = [pair.sequence for pair in pairs]
        if request.charge is not None:
            request.charge(sum(map(len, sequences)))
        job = self._make_job(request, model, sequences, Outputs())
        logits = await self._admission.run(job)
        scores = logits
        if request.normalize or model.always_normalizes:
            scores = sigmoid([logit / model.temperature for logit in logits])
        timings = timings_of(started, tokenized=[stage], jobs=[job])
        tokens = sum(map(len, sequences))
        return RerankResult(scores, rank(logits), None, truncations, tokens, timings)

    async def _rerank_by_vectors(self, model: Embedder, request: RerankRequest) -> RerankResult:
        """Embed the query, then embed and score each passage in the device thread."""
        started = time.perf_counter()
        kinds, weights = model.kinds, request.weights
        by_kind = {"dense": weights.dense, "sparse": weights.sparse, "colbert": weights.colbert}
        if not any(weight and getattr(kinds, kind) for kind, weight in by_kind.items()):
            raise InvalidRequestError(
                "one of the weights must be above 0 of the kinds of vectors that the model makes"
            )
        check_images(request.passages, model)
        inputs = with_memory(request.passages, request.answer)
        ((query,), passages), stage = await self._admission.tokenize(
            model,
            lambda: (
                model.tokenize([request.query], input_type="query"),
                model.tokenize(inputs, truncation=request.truncation, input_type="document"),
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
        size = TOKEN_ID_BYTES * tokens + count_vector_bytes(model, kinds, [len(query.ids)])
        size += count_image_bytes(passages)
        request.answer.reserve(size, *_memory_error_texts(tokens))
        if request.charge is not None:
            request.charge(tokens)
        query_job = self._make_job(request, model, [query.ids], kinds)
        (query_embedding,) = await self._admission.run(query_job)
        passages_job = self._make_job(
            request,
            model,
            [text.ids for text in passages],
            kinds,
            time_spent=query_job.inference_seconds,
            # Scored in the device thread, so that the vectors of a batch are released with it.
            reduce=partial(
                score,
                query_embedding,
                by_product=model.normalizes or model.similarity == "dot",
            ),
        )
        parts = await self._admission.run(passages_job)
        scores = [fuse(weights, part) for part in parts]
        timings = timings_of(started, tokenized=[stage], jobs=[query_job, passages_job])
        return RerankResult(scores, rank(scores), parts, truncations, tokens, timings)


def _memory_error_texts(tokens: int) -> tuple[str, str]:
    """Return the subject and the advice of an error about memory."""
    return f"these {tokens} tokens", "send fewer texts or shorter ones"

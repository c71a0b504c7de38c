"""Requests for scores: reranking by a reranker or by late interaction, and classification."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from smart_embedder.engine import clock
from smart_embedder.engine.checks import (
    UNLIMITED,
    AnswerMemory,
    pair_truncations,
    refuse_truncation,
    text_truncations,
)
from smart_embedder.engine.devices.thread import run_preempting_call
from smart_embedder.engine.model import Classifier, Embedder, LoadedModels, Model, Reranker
from smart_embedder.engine.records import (
    CUT_AT_END,
    ClassificationResult,
    FloatArray,
    Outputs,
    PartScores,
    RerankResult,
    Side,
    SparseVector,
    TextEmbedding,
    TokenizedPair,
    TokenizedText,
    TokenSequence,
    Truncation,
    TruncationOptions,
)
from smart_embedder.engine.requests.embedding import TOKEN_ID_BYTES, vector_bytes
from smart_embedder.engine.scheduling.admission import Admission, timings_of
from smart_embedder.engine.scheduling.batcher import DEFAULT_URGENCY, weight_of
from smart_embedder.engine.scheduling.fairness import ConcurrencyLimit
from smart_embedder.engine.scheduling.job import Job, Purpose
from smart_embedder.errors import EmptyInputError, InvalidRequestError, RerankerDisabledError

# 4 MiB of them.
_MOST_PRODUCTS = 1 << 20
# The vectors of a group of queries hold at most this fraction of what an answer may hold.
_LEAST_GROUPS = 4
_LOGIT_BYTES = 4

Vectors = TypeVar("Vectors", FloatArray, SparseVector)


@dataclass(frozen=True, slots=True)
class FusionWeights:
    """How much each score counts; equal by default, as in FlagEmbedding."""

    dense: float = 1.0
    sparse: float = 1.0
    colbert: float = 1.0

    def __post_init__(self) -> None:
        if not all(np.isfinite(self._all)) or min(self._all) < 0 or not any(self._all):
            raise InvalidRequestError("weights must be at least 0, and one of them above 0")

    def require_one_of(self, kinds: Outputs) -> None:
        """Raise `InvalidRequestError` unless a kind in `kinds` has a weight above 0."""
        available = (kinds.dense, kinds.sparse, kinds.colbert)
        if not any(weight and kind for weight, kind in zip(self._all, available, strict=True)):
            raise InvalidRequestError(
                "one of the weights must be above 0 of the kinds of vectors that the model makes"
            )

    @property
    def _all(self) -> tuple[float, float, float]:
        return self.dense, self.sparse, self.colbert

    def fuse(self, scores: PartScores) -> float:
        """The weighted mean of the scores that are not None."""
        parts = (scores.dense, scores.sparse, scores.colbert)
        counted = [
            (weight, part)
            for weight, part in zip(self._all, parts, strict=True)
            if part is not None
        ]
        return sum(weight * part for weight, part in counted) / sum(weight for weight, _ in counted)


def score(query: TextEmbedding, passage: TextEmbedding) -> PartScores:
    """The scores of one passage by the kinds of vectors that both have."""
    return PartScores(
        dense=_of_both(_dense_score, query.dense, passage.dense),
        sparse=_of_both(_lexical_score, query.sparse, passage.sparse),
        colbert=_of_both(_colbert_score, query.colbert, passage.colbert),
    )


def _of_both(
    score: Callable[[Vectors, Vectors], float], query: Vectors | None, passage: Vectors | None
) -> float | None:
    return None if query is None or passage is None else score(query, passage)


def _dense_score(query: FloatArray, passage: FloatArray) -> float:
    return float(query @ passage)


def _lexical_score(query: SparseVector, passage: SparseVector) -> float:
    _, left, right = np.intersect1d(
        query.indices, passage.indices, assume_unique=True, return_indices=True
    )
    return float(query.values[left] @ passage.values[right])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequest:
    """The options of every request for scores; all but `truncation` are as in `Engine.embed`."""

    truncation: TruncationOptions = CUT_AT_END
    urgency: int = DEFAULT_URGENCY
    client: str = ""
    model: str | None = None
    answer: AnswerMemory = UNLIMITED

    def check_truncations(self, truncations: list[Truncation]) -> None:
        """Raise `TextTooLongError` if a text was truncated and the options forbid it."""
        if not self.truncation.truncate:
            refuse_truncation(truncations)


class ScoringPipeline:
    """Runs the requests that `limit` admits; the forwards of one may take `time_limit` seconds."""

    def __init__(self, admission: Admission, limit: ConcurrencyLimit, time_limit: float) -> None:
        self._admission = admission
        self._limit = limit
        self._time_limit = time_limit

    def _job(
        self,
        model: Model,
        sequences: Sequence[TokenSequence],
        outputs: Outputs,
        request: ScoringRequest,
        *,
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
        started = clock.now()
        call = partial(_tokenize_pairs, model, request)
        pairs = await self._admission.tokenize(model, call, request.texts, request.client)
        truncations = pair_truncations(model, pairs.value, request.truncation.side)
        request.check_truncations(truncations)
        queries = [pairs.value[each[0]].query_kept for each in request.passages_by_query.values()]
        tokens = sum(queries) + sum(pair.passage_kept for pair in pairs.value)
        request.answer.need(TOKEN_ID_BYTES * tokens, *_tokens_needed(tokens))
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
        started = clock.now()
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
        """Embed the queries, then score each passage; return the scores, and the jobs.

        Queries whose vectors would hold much of what they may are taken in several groups.
        """
        by_query = list(request.passages_by_query.values())
        sizes = [vector_bytes(model, kinds, [len(text.ids)]) for text in texts.queries]
        tokens = sum(len(text.ids) for text in (*texts.queries, *texts.passages))
        ids = TOKEN_ID_BYTES * tokens
        groups = _groups(sizes, request.answer.allowed // _LEAST_GROUPS)
        largest = max(sum(sizes[query] for query in group) for group in groups)
        request.answer.need(ids + largest, *_tokens_needed(tokens))
        scores: dict[int, PartScores] = {}
        jobs: list[Job] = []
        for group in groups:
            passages = [(passage, query) for query in group for passage in by_query[query]]
            ids_of_queries = [texts.queries[query].ids for query in group]
            spent = sum(job.inference_seconds for job in jobs)
            job = self._job(model, ids_of_queries, kinds, request, time_spent=spent)
            embedded = dict(zip(group, await self._admission.run(job), strict=True))
            own = [embedded[query] for _, query in passages]
            job.forget()
            jobs.append(job)
            job = self._job(
                model,
                [texts.passages[passage].ids for passage, _ in passages],
                kinds,
                request,
                time_spent=spent + job.inference_seconds,
                # In the device thread, so that a passage's token vectors are freed with its batch.
                reduce=partial(_score_for, own),
            )
            for (passage, _), part in zip(passages, await self._admission.run(job), strict=True):
                scores[passage] = part
            job.forget()
            jobs.append(job)
        return [scores[index] for index in range(len(request.passages))], jobs


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


@dataclass(frozen=True, slots=True)
class ClassificationRequest(ScoringRequest):
    """Texts to classify, each alone or with a second one."""

    inputs: list[tuple[str, str | None]]

    @property
    def texts(self) -> list[str]:
        """Every text."""
        return [text for pair in self.inputs for text in pair if text is not None]


class ClassificationPipeline(ScoringPipeline):
    """Runs classification requests, within the same limits as rerank requests."""

    async def run(
        self, models: LoadedModels, request: ClassificationRequest
    ) -> ClassificationResult:
        """The logits of every input; raises `InvalidRequestError` where no model has labels."""
        model = _classifier_of(models)
        async with self._limit.hold(request.client):
            started = clock.now()
            call = partial(_tokenize, model, request)
            texts = await self._admission.tokenize(model, call, request.texts, request.client)
            side = request.truncation.side
            truncations = text_truncations(model, texts.value, "inputs", side)
            request.check_truncations(truncations)
            sequences = [text.ids for text in texts.value]
            size = TOKEN_ID_BYTES * sum(map(len, sequences))
            size += _LOGIT_BYTES * len(model.labels) * len(sequences)
            what = f"the labels of these {len(sequences)} inputs"
            request.answer.need(size, what, "send fewer inputs or shorter ones")
            job = self._job(model, sequences, Outputs(logits=True), request)
            logits = await self._admission.run(job)
        return ClassificationResult(
            labels=model.labels,
            logits=logits,
            truncations=truncations,
            tokens=sum(map(len, sequences)),
            timings=timings_of(started, tokenized=[texts.stage], jobs=[job]),
        )


def _classifier_of(models: LoadedModels) -> Classifier:
    if isinstance(models.reranker, Classifier):
        return models.reranker
    if models.reranker is None:
        raise RerankerDisabledError(
            "there is no model with labels here: RERANKER_MODEL names a cross-encoder"
        )
    raise InvalidRequestError(
        f"{models.reranker.name} has no labels: only a cross-encoder as RERANKER_MODEL has"
    )


def _tokenize(model: Classifier, request: ClassificationRequest) -> list[TokenizedText]:
    return [model.tokenize_input(*each, request.truncation) for each in request.inputs]

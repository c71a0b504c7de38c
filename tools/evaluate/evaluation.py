"""One source on one data set: embed all of it once, rank with every representation, rerank."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytrec_eval

from smart_embedder.engine.records import NO_OPTIONS, EmbeddingOptions, TextEmbedding
from tools.evaluate.dataset import Corpus, Dataset, Qrels
from tools.evaluate.representations import Piece, Queries, Representation, Scores
from tools.evaluate.sources import Embedded, Source

Indices = npt.NDArray[np.int64]
# recall@100 needs no more.
MOST_RANKED = 100
_MEASURES = {"ndcg_cut.10": "ndcg_cut_10", "recall.100": "recall_100", "success.1": "success_1"}
RERANKED = "reranked"
# Documents of one request, and requests under way: the next is tokenised while one is computed.
_REQUEST = 32
_AT_ONCE = 4


class Ranking:
    """The best `most` documents of each query by score.

    Where other scores are given as well, the documents are ordered by these at the end. A document
    whose score is -infinity is never among them.
    """

    def __init__(self, num_queries: int, most: int = MOST_RANKED) -> None:
        self._most = most
        self._scores = np.empty((num_queries, 0), np.float32)
        self._order_by = self._scores
        self._indices = np.empty((num_queries, 0), np.int64)

    def add(self, begin: int, scores: Scores, order_by: Scores | None = None) -> None:
        """Add documents from the index `begin` on: `scores` are `[queries, documents]`."""
        indices = np.broadcast_to(np.arange(begin, begin + scores.shape[1]), scores.shape)
        other = scores if order_by is None else order_by
        every = np.concatenate((self._scores, scores), axis=1)
        # Stable: of equal scores the earlier document stays.
        best = np.argsort(-every, axis=1, kind="stable")[:, : self._most]

        def kept(before: Any, added: Any) -> Any:
            return np.take_along_axis(np.concatenate((before, added), axis=1), best, axis=1)

        self._scores = kept(self._scores, scores)
        self._indices = kept(self._indices, indices)
        self._order_by = kept(self._order_by, other)

    def of_query(self, query: int) -> list[int]:
        """The indices of the query's documents, the best first."""
        order = np.argsort(-self._order_by[query], kind="stable")
        found = order[self._scores[query, order] > -np.inf]
        indices: list[int] = self._indices[query, found].tolist()
        return indices


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over all queries, as trec_eval computes them.

    - `ndcg_10`: nDCG of the first ten, whose gain is the grade itself.
    - `recall_100`: the share of relevant documents among the first hundred.
    - `success_1`: the share of queries whose first document is relevant.
    """

    ndcg_10: float
    recall_100: float
    success_1: float


def measure(run: Mapping[str, Mapping[str, float]], qrels: Qrels) -> Quality:
    """The quality of `run`, scores by query and document; a query without documents counts 0.

    Source: pytrec_eval, as BEIR and mteb use it.
    """
    found = pytrec_eval.RelevanceEvaluator(qrels, set(_MEASURES)).evaluate(run)
    means = (
        sum(found.get(query, {}).get(name, 0.0) for query in qrels) / len(qrels)
        for name in _MEASURES.values()
    )
    return Quality(*means)


def run_of(ranked: Mapping[str, list[int]], corpus: Corpus) -> dict[str, dict[str, float]]:
    """What `measure` takes, of the indices of each query's documents, the best first.

    The rank stands for the score: trec_eval would order equal scores by id.
    """
    return {
        query: {document.id: -float(rank) for rank, document in enumerate(corpus.read(indices))}
        for query, indices in ranked.items()
    }


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a source was; what was not measured is None.

    Queries were embedded one after the other, documents several requests at a time. The latency of
    reranking is that of one query with all of its candidates.
    """

    documents_per_second: float
    tokens_per_second: float | None
    query_p50_ms: float
    query_p99_ms: float
    pairs_per_second: float | None = None
    rerank_p50_ms: float | None = None
    rerank_p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What a representation is worth, and the bytes of a document's vectors on average."""

    representation: str
    quality: Quality
    bytes_per_document: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that was seen of a source."""

    source: str
    rows: list[Row]
    speed: Speed


@dataclass(frozen=True, slots=True)
class Plan:
    """What is evaluated: these representations, and reranking of the best `rerank_depth`.

    Candidates are those of the representation `candidates`. The options are those of queries and of
    documents: what is read before them.
    """

    representations: Sequence[Representation]
    rerank_depth: int
    candidates: str
    query_options: EmbeddingOptions = NO_OPTIONS
    document_options: EmbeddingOptions = NO_OPTIONS

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of vectors that are needed."""
        return frozenset().union(*(each.kinds for each in self.representations))


@dataclass(slots=True)
class Evaluator:
    """Evaluates one source; `on_progress` hears how many documents or queries are done."""

    source: Source
    dataset: Dataset
    plan: Plan
    on_progress: Callable[[int], object] = lambda _: None
    # Of the documents; no tokens where the source does not tell.
    _seconds: float = 0.0
    _tokens: int = 0

    async def run(self) -> Evaluation:
        """Embed, rank, rerank and measure."""
        reranks = bool(self.source.reranks and self.plan.rerank_depth)
        if reranks:  # To warm up, and to fail now if it does.
            await self.source.rerank("a", ["b"])
        queries, query_seconds = await self._embed_queries()
        rankings, num_bytes = await self._rank(Queries(queries))
        documents = len(self.dataset.corpus)
        rows = [
            Row(name, self._quality(self._ranked(ranking)), num_bytes[name] / documents)
            for name, ranking in rankings.items()
        ]
        query_p50, query_p99 = np.percentile(query_seconds, [50, 99]) * 1000
        speed = Speed(
            documents_per_second=documents / self._seconds,
            tokens_per_second=self._tokens / self._seconds if self._tokens else None,
            query_p50_ms=float(query_p50),
            query_p99_ms=float(query_p99),
        )
        if reranks:
            candidates = self._ranked(rankings[self.plan.candidates])
            ordered, seconds, pairs = await self._rerank(candidates)
            rows.append(Row(RERANKED, self._quality(ordered), None))
            p50, p99 = np.percentile(seconds, [50, 99]) * 1000
            speed = replace(
                speed,
                pairs_per_second=pairs / sum(seconds),
                rerank_p50_ms=float(p50),
                rerank_p99_ms=float(p99),
            )
        return Evaluation(self.source.name, rows, speed)

    async def _embed_queries(self) -> tuple[list[TextEmbedding], list[float]]:
        """Their vectors, and the seconds of each; a first one is asked twice, to warm up."""
        embeddings, seconds = [], []
        texts = list(self.dataset.queries.values())
        for index, text in enumerate([texts[0], *texts]):
            answer = await self.source.embed([text], self.plan.kinds, self.plan.query_options)
            if index:
                embeddings += answer.embeddings
                seconds.append(answer.seconds)
        return embeddings, seconds

    async def _rank(self, queries: Queries) -> tuple[dict[str, Ranking], dict[str, int]]:
        """The ranking of each representation, and the bytes of all documents."""
        named = {each.name: each for each in self.plan.representations}
        rankings = {name: Ranking(len(self.dataset.queries)) for name in named}
        num_bytes = dict.fromkeys(named, 0)
        for begin, documents in self.dataset.pieces():
            found = self.dataset.may_find(documents)
            piece = Piece(queries, await self._embed_documents([each.text for each in documents]))
            for name, representation in named.items():
                scored, order_by = representation.score(piece), representation.order_by
                others = None if order_by is None else order_by(piece).scores
                scores = scored.scores
                if found is not None:
                    scores = np.where(found, scores, np.float32(-np.inf))
                rankings[name].add(begin, scores, others)
                num_bytes[name] += scored.num_bytes
            self.on_progress(len(documents))
        return rankings, num_bytes

    async def _embed_documents(self, texts: list[str]) -> list[TextEmbedding]:
        permits = asyncio.Semaphore(_AT_ONCE)

        async def embed(some: list[str]) -> Embedded:
            async with permits:
                return await self.source.embed(some, self.plan.kinds, self.plan.document_options)

        began = time.perf_counter()
        requests = (texts[begin : begin + _REQUEST] for begin in range(0, len(texts), _REQUEST))
        answers = await asyncio.gather(*map(embed, requests))
        self._seconds += time.perf_counter() - began
        self._tokens += sum(each.tokens or 0 for each in answers)
        return [embedding for answer in answers for embedding in answer.embeddings]

    def _ranked(self, ranking: Ranking) -> dict[str, list[int]]:
        """The indices of each query's documents, the best first."""
        return {query: ranking.of_query(row) for row, query in enumerate(self.dataset.queries)}

    async def _rerank(
        self, candidates: dict[str, list[int]]
    ) -> tuple[dict[str, list[int]], list[float], int]:
        """The candidates in the reranker's order, the seconds of each query, and the pairs."""
        ordered, seconds, pairs = {}, [], 0
        for query, indices in candidates.items():
            chosen, rest = indices[: self.plan.rerank_depth], indices[self.plan.rerank_depth :]
            passages = [document.text for document in self.dataset.corpus.read(chosen)]
            began = time.perf_counter()
            scores = await self.source.rerank(self.dataset.queries[query], passages)
            seconds.append(time.perf_counter() - began)
            pairs += len(passages)
            order = np.argsort(-np.array(scores), kind="stable")
            ordered[query] = [*(chosen[index] for index in order), *rest]
        return ordered, seconds, pairs

    def _quality(self, ranked: dict[str, list[int]]) -> Quality:
        return measure(run_of(ranked, self.dataset.corpus), self.dataset.qrels)

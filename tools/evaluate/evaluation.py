"""One source on one data set: embed all of it once, rank with every representation, rerank."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from smart_embedder.engine.records import NO_OPTIONS, EmbeddingOptions, TextEmbedding
from tools.evaluate.dataset import Dataset
from tools.evaluate.quality import (
    Difference,
    Figures,
    Interval,
    Quality,
    compare,
    interval_of,
    measure,
    run_of,
)
from tools.evaluate.representations import (
    KINDS,
    RRF_WEIGHTS,
    SPARSE,
    Piece,
    Queries,
    Representation,
    Scores,
    fuse_ranks,
    whole,
)
from tools.evaluate.sources import Embedded, Source

Ranked = dict[str, list[int]]
# recall@100 needs no more, and the page and the client fuse as many.
MOST_RANKED = 100
# As in the page and the client: a document gets weight / rank.
RRF_CONSTANT = 0
# Documents of one request, and requests under way: the next is tokenised while one is computed.
_REQUEST = 32
_AT_ONCE = 4
_NOT_FOUND = np.float32(-np.inf)


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
    """What a representation is worth, and the bytes of a document's vectors on average.

    `interval` is that of nDCG@10; `difference` is None for the baseline itself.
    """

    representation: str
    quality: Quality
    bytes_per_document: float | None
    interval: Interval
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that was seen of a source."""

    source: str
    rows: list[Row]
    speed: Speed


@dataclass(frozen=True, slots=True)
class Plan:
    """What is evaluated: these representations, and reranking of the best `rerank_depth`.

    Candidates are those of each representation that `candidates` names, and `baseline` is the one
    that all are compared with. The options are those of queries and of documents: what is read
    before them.
    """

    representations: Sequence[Representation]
    rerank_depth: int
    candidates: Sequence[str]
    baseline: str
    rrf_constant: int = RRF_CONSTANT
    rrf_weights: Mapping[str, float] = field(default_factory=lambda: RRF_WEIGHTS)
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
        found, num_bytes = await self._rank(Queries(queries))
        documents = len(self.dataset.corpus)
        query_p50, query_p99 = np.percentile(query_seconds, [50, 99]) * 1000
        speed = Speed(
            documents_per_second=documents / self._seconds,
            tokens_per_second=self._tokens / self._seconds if self._tokens else None,
            query_p50_ms=float(query_p50),
            query_p99_ms=float(query_p99),
        )
        if reranks:
            seconds, pairs = list[float](), 0
            for name in self.plan.candidates:
                ordered, taken, scored = await self._rerank(found[name])
                found[f"{name}, reranked"] = ordered
                seconds += taken
                pairs += scored
            p50, p99 = np.percentile(seconds, [50, 99]) * 1000
            speed = replace(
                speed,
                pairs_per_second=pairs / sum(seconds),
                rerank_p50_ms=float(p50),
                rerank_p99_ms=float(p99),
            )
        sizes = {name: total / documents for name, total in num_bytes.items()}
        return Evaluation(self.source.name, self._rows(found, sizes), speed)

    def _rows(self, found: Mapping[str, Ranked], sizes: Mapping[str, float]) -> list[Row]:
        corpus, qrels = self.dataset.corpus, self.dataset.qrels
        figures = {name: measure(run_of(each, corpus), qrels) for name, each in found.items()}

        def row(name: str, each: Figures) -> Row:
            ndcg, baseline = each[:, 0], figures[self.plan.baseline][:, 0]
            difference = None if name == self.plan.baseline else compare(ndcg, baseline)
            quality = Quality(*map(float, each.mean(axis=0)))
            return Row(name, quality, sizes.get(name), interval_of(ndcg), difference)

        return [row(name, each) for name, each in figures.items()]

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

    async def _rank(self, queries: Queries) -> tuple[dict[str, Ranked], dict[str, int]]:
        """What each representation finds, and the bytes of all documents."""
        asked = self.plan.representations
        by_ranks = [each for each in asked if each.score is None]
        parts = [whole(kind) for each in by_ranks for kind in each.kinds]
        scored = {each.name: (each, each.score) for each in [*parts, *asked] if each.score}
        rankings = {name: Ranking(len(self.dataset.queries)) for name in scored}
        num_bytes = dict.fromkeys(scored, 0)
        for begin, documents in self.dataset.pieces():
            piece = Piece(queries, await self._embed_documents([each.text for each in documents]))
            allowed = self.dataset.may_find(documents)
            for name, (representation, score) in scored.items():
                made, order_by = score(piece), representation.order_by
                scores = made.scores
                if representation.kinds == {SPARSE}:  # An index finds only what shares a token.
                    scores = np.where(scores > 0, scores, _NOT_FOUND)
                if allowed is not None:
                    scores = np.where(allowed, scores, _NOT_FOUND)
                rankings[name].add(begin, scores, order_by and order_by(piece).scores)
                num_bytes[name] += made.num_bytes
            self.on_progress(len(documents))
        ranked = {
            name: {query: of.of_query(row) for row, query in enumerate(self.dataset.queries)}
            for name, of in rankings.items()
        }
        for each in by_ranks:
            kinds = [kind for kind in KINDS if kind in each.kinds]
            ranked[each.name] = {
                query: fuse_ranks(
                    {kind: ranked[kind][query] for kind in kinds},
                    self.plan.rrf_constant,
                    self.plan.rrf_weights,
                )[:MOST_RANKED]
                for query in self.dataset.queries
            }
            num_bytes[each.name] = sum(num_bytes[kind] for kind in kinds)
        names = [each.name for each in asked]
        return {name: ranked[name] for name in names}, {name: num_bytes[name] for name in names}

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

    async def _rerank(self, candidates: Ranked) -> tuple[Ranked, list[float], int]:
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

"""Evaluate a service on a data set: embed once, rank by each representation, rerank."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from tqdm import tqdm

from smart_embedder.requests import InputType
from smart_embedder.results import TextEmbedding
from tools.evaluate import quality
from tools.evaluate.dataset import Dataset
from tools.evaluate.models import Models
from tools.evaluate.representations import KINDS, SPARSE, Form, Fusion, Scored, fuse_ranks

# As many as recall@100 needs, and as the page and the client fuse.
MAX_RANKED = 100
# Their vectors are in memory: ColBERT vectors of a text of full length take 32 MB.
_DOCUMENTS_PER_CHUNK = 64
# While one request is computed, the next ones are tokenized.
_TEXTS_PER_REQUEST = 16
_CONCURRENT_REQUESTS = 4


class Ranking:
    """The best `limit` documents of each query, except those with a score of -infinity."""

    def __init__(self, num_queries: int, limit: int = MAX_RANKED) -> None:
        self._limit = limit
        self._scores = np.empty((num_queries, 0), np.float32)
        self._indices = np.empty((num_queries, 0), np.int64)
        self._seen = 0
        self.num_bytes = 0

    def add(self, scored: Scored) -> None:
        """Add the next documents."""
        scores = np.concatenate((self._scores, scored.scores), axis=1)
        added = np.arange(self._seen, self._seen + scored.scores.shape[1])
        indices = np.hstack((self._indices, np.broadcast_to(added, scored.scores.shape)))
        # Stable, so that with equal scores the earlier document comes first.
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self._limit]
        self._scores = np.take_along_axis(scores, best, axis=1)
        self._indices = np.take_along_axis(indices, best, axis=1)
        self._seen += len(added)
        self.num_bytes += scored.num_bytes

    def of_query(self, query: int) -> list[int]:
        """Return the indices of the query's documents, the best first."""
        indices: list[int] = self._indices[query, self._scores[query] > -np.inf].tolist()
        return indices


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a representation, and the average size of a document's vectors.

    `interval` is the one of nDCG@10; `difference` is None for the baseline.
    """

    representation: str
    figures: dict[str, float]
    bytes_per_document: float | None
    interval: quality.Interval
    difference: quality.Difference | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The representations to compare with `baseline`, whose best documents are reranked."""

    representations: Sequence[Form | Fusion]
    rerank_depth: int
    baseline: str
    rrf_constant: int
    rrf_weights: Mapping[str, float]


def evaluate(models: Models, dataset: Dataset, plan: Plan) -> list[Row]:
    """Embed, rank, rerank and measure."""
    if plan.rerank_depth:  # Fail before the documents are embedded.
        models.rerank("a", ["b"])
    rankings = _rank(models, dataset, plan)
    sizes = {name: ranking.num_bytes for name, ranking in rankings.items()}
    found = {
        name: [ranking.of_query(row) for row in range(len(dataset.queries))]
        for name, ranking in rankings.items()
    }
    for fusion in plan.representations:
        if isinstance(fusion, Fusion) and fusion.by_rank:
            parts = [kind for kind in KINDS if kind in fusion.kinds]
            sizes[fusion.name] = sum(sizes[kind] for kind in parts)
            fuse = partial(fuse_ranks, constant=plan.rrf_constant, weights=plan.rrf_weights)
            found[fusion.name] = [
                fuse(dict(zip(parts, ranked, strict=True)))[:MAX_RANKED]
                for ranked in zip(*(found[kind] for kind in parts), strict=True)
            ]
    names = [representation.name for representation in plan.representations]
    if plan.rerank_depth:
        names.append(f"{plan.baseline}, reranked")
        found[names[-1]] = _rerank(models, dataset, plan.rerank_depth, found[plan.baseline])
    ids, figures = [*dataset.documents], {}
    for name in names:
        ranked = ([ids[index] for index in indices] for indices in found[name])
        best = dict(zip(dataset.queries, ranked, strict=True))
        figures[name] = quality.measure(best, dataset.qrels)
    baseline = figures[plan.baseline][:, 0]
    return [
        Row(
            name,
            dict(zip(quality.MEASURES, figures[name].mean(axis=0).tolist(), strict=True)),
            sizes[name] / len(ids) if name in sizes else None,
            quality.bootstrap_interval(figures[name][:, 0]),
            None if name == plan.baseline else quality.compare(figures[name][:, 0], baseline),
        )
        for name in names
    ]


def _rank(models: Models, dataset: Dataset, plan: Plan) -> dict[str, Ranking]:
    """Rank by each form and by fused scores, and by each kind that a fusion needs."""
    kinds = frozenset[str]().union(*(item.kinds for item in plan.representations))
    forms = {kind: Form(kind, kind) for kind in kinds}
    forms |= {form.name: form for form in plan.representations if isinstance(form, Form)}
    fusions = [f for f in plan.representations if isinstance(f, Fusion) and not f.by_rank]
    queries = _embed(models, [*dataset.queries.values()], kinds, "query")
    rankings = {name: Ranking(len(queries)) for name in [*forms, *(f.name for f in fusions)]}
    texts = [*dataset.documents.values()]
    for start in tqdm(range(0, len(texts), _DOCUMENTS_PER_CHUNK)):
        documents = _embed(models, texts[start : start + _DOCUMENTS_PER_CHUNK], kinds, "document")
        scored = {name: form.score(queries, documents) for name, form in forms.items()}
        for fusion in fusions:
            parts = [scored[kind] for kind in KINDS if kind in fusion.kinds]
            mean = np.mean(np.stack([part.scores for part in parts]), axis=0)
            scored[fusion.name] = Scored(mean, sum(part.num_bytes for part in parts))
        if SPARSE in scored:  # An index finds only documents that share a token with the query.
            sparse = scored[SPARSE]
            shared = np.where(sparse.scores > 0, sparse.scores, np.float32(-np.inf))
            scored[SPARSE] = Scored(shared, sparse.num_bytes)
        for name, ranking in rankings.items():
            ranking.add(scored[name])
    return rankings


def _embed(
    models: Models, texts: list[str], kinds: frozenset[str], role: InputType
) -> list[TextEmbedding]:
    starts = range(0, len(texts), _TEXTS_PER_REQUEST)
    requests = [texts[start : start + _TEXTS_PER_REQUEST] for start in starts]
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as threads:
        answers = threads.map(lambda request: models.embed(request, kinds, role), requests)
        return [text for answer in answers for text in answer]


def _rerank(
    models: Models, dataset: Dataset, depth: int, candidates: list[list[int]]
) -> list[list[int]]:
    """Order the first `depth` candidates by the reranker; the others follow in their order."""
    texts, ordered = [*dataset.documents.values()], []
    for query, indices in zip(dataset.queries.values(), candidates, strict=True):
        chosen, rest = indices[:depth], indices[depth:]
        scores = models.rerank(query, [texts[index] for index in chosen]) if chosen else []
        order = np.argsort(-np.array(scores), kind="stable")
        ordered.append([*(chosen[index] for index in order), *rest])
    return ordered

"""The best documents of each query, kept while the corpus passes by, and what they are worth."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytrec_eval

from tools.evaluate.dataset import Corpus, Qrels
from tools.evaluate.representations import Scores

Indices = npt.NDArray[np.int64]
# recall@100 needs no more.
MOST_RANKED = 100
_MEASURES = {"ndcg_cut.10": "ndcg_cut_10", "recall.100": "recall_100", "success.1": "success_1"}


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
        self._indices = np.concatenate((self._indices, indices), axis=1)
        self._scores = np.concatenate((self._scores, scores), axis=1)
        other = scores if order_by is None else order_by
        self._order_by = np.concatenate((self._order_by, other), axis=1)
        # Stable: of equal scores the earlier document stays.
        best = np.argsort(-self._scores, axis=1, kind="stable")[:, : self._most]
        self._indices = np.take_along_axis(self._indices, best, axis=1)
        self._scores = np.take_along_axis(self._scores, best, axis=1)
        self._order_by = np.take_along_axis(self._order_by, best, axis=1)

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

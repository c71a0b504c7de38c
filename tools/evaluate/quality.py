"""How good rankings are, how sure that is, and whether one is better than another."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytrec_eval
from scipy import stats

from tools.evaluate.dataset import Corpus, Qrels

Figures = npt.NDArray[np.float64]
Interval = tuple[float, float]

_MEASURES = {"ndcg_cut.10": "ndcg_cut_10", "recall.100": "recall_100", "success.1": "success_1"}
# By chance: always the same, in pieces that bound the memory.
_DRAWN = {"n_resamples": 9999, "batch": 100, "rng": 0}
_SIGNIFICANT = 0.05


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


def measure(run: Mapping[str, Mapping[str, float]], qrels: Qrels) -> Figures:
    """The figures of `Quality` for each query of `qrels`, `[queries, 3]`.

    `run` has scores by query and document; a query without documents counts 0. Source: pytrec_eval,
    as BEIR and mteb use it.
    """
    found = pytrec_eval.RelevanceEvaluator(qrels, set(_MEASURES)).evaluate(run)
    return np.array(
        [[found.get(query, {}).get(name, 0.0) for name in _MEASURES.values()] for query in qrels]
    )


def run_of(ranked: Mapping[str, list[int]], corpus: Corpus) -> dict[str, dict[str, float]]:
    """What `measure` takes, of the indices of each query's documents, the best first.

    The rank stands for the score: trec_eval would order equal scores by id.
    """
    return {
        query: {document.id: -float(rank) for rank, document in enumerate(corpus.read(indices))}
        for query, indices in ranked.items()
    }


def interval_of(figures: Figures) -> Interval:
    """The 95 % interval of the mean of one figure a query, by bootstrap over the queries.

    Of one query nothing is known: everything that a figure or a difference may be.
    """
    if len(figures) == 1:
        return -1.0, 1.0
    found = stats.bootstrap((figures,), np.mean, method="percentile", **_DRAWN)
    low, high = found.confidence_interval
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Difference:
    """What a ranking's nDCG@10 has more than the baseline's, for the same queries.

    `p_value` is that of a paired permutation test: how often the mean is as far from 0 where it is
    left to chance which of the two a query's figures belong to.
    """

    mean: float
    interval: Interval
    p_value: float

    @property
    def is_shown(self) -> bool:
        """Whether it is more than noise: the interval leaves 0 out, and the test agrees."""
        low, high = self.interval
        return not low <= 0 <= high and self.p_value <= _SIGNIFICANT


def compare(ours: Figures, baseline: Figures) -> Difference:
    """The difference of one figure a query from the baseline's, in the same order of queries."""
    each = ours - baseline
    if len(each) == 1:
        return Difference(float(each[0]), interval_of(each), 1.0)
    tested = stats.permutation_test(
        (each,), np.mean, permutation_type="samples", vectorized=True, **_DRAWN
    )
    return Difference(float(each.mean()), interval_of(each), float(tested.pvalue))

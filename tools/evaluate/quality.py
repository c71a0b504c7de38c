"""How good rankings are, how sure that is, and whether one is better than another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytrec_eval
from scipy import stats

from tools.evaluate.dataset import Qrels

Figures = npt.NDArray[np.float64]
Interval = tuple[float, float]

# nDCG of the first ten, whose gain is the grade itself; the share of relevant documents among the
# first hundred; whether the first document is relevant.
MEASURES = {"nDCG@10": "ndcg_cut.10", "recall@100": "recall.100", "first": "success.1"}
# The same random draws in every run, in pieces that bound the memory.
_DRAWN = {"n_resamples": 9999, "batch": 100, "rng": 0}
_SIGNIFICANT = 0.05


def measure(found: Mapping[str, Sequence[str]], qrels: Qrels) -> Figures:
    """The figures of `MEASURES` for each query of `qrels`, `[queries, 3]`.

    `found` has the ids of each query's documents, the best first; a query without documents counts
    0. Source: pytrec_eval, as BEIR and mteb use it.
    """
    # The rank stands for the score: trec_eval would order equal scores by id.
    run = {
        query: {document: -float(rank) for rank, document in enumerate(documents)}
        for query, documents in found.items()
    }
    rated = pytrec_eval.RelevanceEvaluator(qrels, {*MEASURES.values()}).evaluate(run)
    names = [name.replace(".", "_") for name in MEASURES.values()]
    return np.array([[rated.get(query, {}).get(name, 0.0) for name in names] for query in qrels])


def interval_of(figures: Figures) -> Interval:
    """The 95 % interval of the mean of one figure a query, by bootstrap over the queries.

    One query tells nothing: the interval is everything that a figure or a difference may be.
    """
    if len(figures) == 1:
        return -1.0, 1.0
    found = stats.bootstrap((figures,), np.mean, method="percentile", **_DRAWN)
    low, high = found.confidence_interval
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Difference:
    """How much a ranking's nDCG@10 is above the baseline's, for the same queries.

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
    more = ours - baseline
    if len(more) == 1:
        return Difference(float(more[0]), interval_of(more), 1.0)
    tested = stats.permutation_test(
        (more,), np.mean, permutation_type="samples", vectorized=True, **_DRAWN
    )
    return Difference(float(more.mean()), interval_of(more), float(tested.pvalue))

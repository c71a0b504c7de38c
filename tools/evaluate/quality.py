"""Figures of rankings, their confidence intervals, and significance tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytrec_eval
from scipy import stats

from tools.evaluate.dataset import Qrels

Figures = npt.NDArray[np.float64]
Interval = tuple[float, float]

# nDCG of the first ten, with the grade as the gain; the share of relevant documents in the first
# hundred; whether the first document is relevant.
MEASURES = {"nDCG@10": "ndcg_cut.10", "recall@100": "recall.100", "first": "success.1"}
# The same random draws in each run, in batches that limit the memory.
_RESAMPLING = {"n_resamples": 9999, "batch": 100, "rng": 0}
_SIGNIFICANT = 0.05


def measure(found: Mapping[str, Sequence[str]], qrels: Qrels) -> Figures:
    """Compute the figures of `MEASURES` for each query of `qrels`, `[queries, 3]`.

    `found` has the ids of each query's documents, the best first; a query without documents has the
    figures 0. Source: pytrec_eval, as used by BEIR and mteb.
    """
    # Ranks instead of scores, because trec_eval orders equal scores by id.
    run = {
        query: {document: -float(rank) for rank, document in enumerate(documents)}
        for query, documents in found.items()
    }
    rated = pytrec_eval.RelevanceEvaluator(qrels, {*MEASURES.values()}).evaluate(run)
    names = [name.replace(".", "_") for name in MEASURES.values()]
    return np.array([[rated.get(query, {}).get(name, 0.0) for name in names] for query in qrels])


def bootstrap_interval(figures: Figures) -> Interval:
    """Compute the 95 % interval of the mean of one figure per query, by bootstrap over queries.

    With a single query, the interval is the whole range of figures and differences.
    """
    if len(figures) == 1:
        return -1.0, 1.0
    found = stats.bootstrap((figures,), np.mean, method="percentile", **_RESAMPLING)
    low, high = found.confidence_interval
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of a ranking's nDCG@10 from the baseline's, for the same queries.

    `p_value` is from a paired permutation test: how often the mean is as far from 0 if the two
    figures of each query are swapped at random.
    """

    mean: float
    interval: Interval
    p_value: float

    @property
    def is_shown(self) -> bool:
        """Whether it is significant: the interval excludes 0, and the test agrees."""
        low, high = self.interval
        return not low <= 0 <= high and self.p_value <= _SIGNIFICANT


def compare(ours: Figures, baseline: Figures) -> Difference:
    """Compare one figure per query with the baseline's, in the same order of queries."""
    differences = ours - baseline
    if len(differences) == 1:
        return Difference(float(differences[0]), bootstrap_interval(differences), 1.0)
    test = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", vectorized=True, **_RESAMPLING
    )
    mean = float(differences.mean())
    return Difference(mean, bootstrap_interval(differences), float(test.pvalue))

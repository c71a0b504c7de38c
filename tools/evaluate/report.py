"""What an evaluation says: tables for a person, JSON for a program."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smart_embedder import __version__
from tools.evaluate.dataset import Dataset
from tools.evaluate.evaluation import Evaluation, Row
from tools.table import markdown

_SPEEDS = {
    "documents/s": "documents_per_second",
    "tokens/s": "tokens_per_second",
    "query P50 ms": "query_p50_ms",
    "query P99 ms": "query_p99_ms",
    "pairs/s": "pairs_per_second",
    "rerank P50 ms": "rerank_p50_ms",
    "rerank P99 ms": "rerank_p99_ms",
}
_COMPARED = ("nDCG@10", "recall@100")


def print_report(dataset: Dataset, evaluations: Sequence[Evaluation]) -> None:
    """Quality by representation, a reference's beside ours, and how fast each source was."""
    ours, *others = evaluations
    own = "" if dataset.candidates is None else ", each with candidates of its own"
    counts = f"{len(dataset.corpus)} documents, {len(dataset.queries)} queries{own}"
    print(f"{dataset.name}: {counts}.\n")
    print(markdown(*_quality(ours, others)))
    print()
    rows = []
    for each in evaluations:
        speeds = (getattr(each.speed, name) for name in _SPEEDS.values())
        rows.append([each.source, *("" if one is None else f"{one:,.1f}" for one in speeds)])
    print(markdown(["source", *_SPEEDS], rows))


def write_json(
    path: Path, dataset: Dataset, evaluations: Sequence[Evaluation], options: dict[str, Any]
) -> None:
    """The same figures, unrounded, and what they were made with."""
    told = {
        "version": __version__,
        "dataset": dataset.name,
        "documents": len(dataset.corpus),
        "queries": len(dataset.queries),
        "options": options,
        "evaluations": [asdict(each) for each in evaluations],
    }
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _quality(ours: Evaluation, others: Sequence[Evaluation]) -> tuple[list[str], list[list[str]]]:
    heads = ["representation", "bytes", *_COMPARED, "first"]
    heads += [f"{figure} of {each.source}" for each in others for figure in _COMPARED]
    references = [{row.representation: row for row in each.rows} for each in others]
    rows = []
    for row in ours.rows:
        theirs = [
            cell for reference in references for cell in _of(reference.get(row.representation))
        ]
        size = "" if row.bytes_per_document is None else f"{row.bytes_per_document:,.0f}"
        own = [*_of(row), f"{row.quality.success_1:.4f}"]
        rows.append([row.representation, size, *own, *theirs])
    return heads, rows


def _of(row: Row | None) -> list[str]:
    """The figures that are compared; empty cells for what a source has not."""
    if row is None:
        return [""] * len(_COMPARED)
    return [f"{figure:.4f}" for figure in (row.quality.ndcg_10, row.quality.recall_100)]

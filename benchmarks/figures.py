"""From outcomes to the figures of the table and of the JSON file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.adapters.interface import FloatArray
from benchmarks.comparison import Outcome
from tools.table import markdown

Arrays = Mapping[str, FloatArray]

# The ratios are to the faster of these.
REFERENCES = ("flagembedding", "flagembedding-defaults")
# The cosines are to the first of these that ran.
EXACT = (*REFERENCES, "smart-embedder-float32")
# The columns between the setting and the rounds, and how a figure is written in them.
_FIGURES = {
    "texts/s": ("texts_per_second", ".2f"),
    "tokens/s": ("tokens_per_second", ".0f"),
    "ratio": ("ratio", ".2f"),
    "peak MiB": ("peak_mib", ".0f"),
    "dense cosine": ("dense", ".6f"),
    "ColBERT cosine": ("colbert", ".6f"),
    "P50 ms": ("p50_ms", ".1f"),
    "P99 ms": ("p99_ms", ".1f"),
}


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured of one engine; None where there is nothing to compare with.

    `ratio` is to the faster FlagEmbedding; `dense` and `colbert` are the worst cosine of a text and
    of a token to float32; `p50_ms` and `p99_ms` are of single calls;
    `rounds` are seconds of the whole workload.
    """

    texts_per_second: float
    tokens_per_second: float
    ratio: float | None
    peak_mib: float
    dense: float | None
    colbert: float | None
    p50_ms: float
    p99_ms: float
    rounds: list[float]


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, with its speed or the reason why it has none."""

    engine: str
    version: str
    setting: str
    dense_only: bool
    failure: str
    speed: Speed | None


def rows_of(outcomes: Sequence[Outcome], lengths: list[int]) -> list[Row]:
    """A row for each outcome, of texts that have so many tokens."""
    ran = {each.name: each for each in outcomes if each.measured}
    reference = min((ran[name].median for name in REFERENCES if name in ran), default=None)
    exact = next((_vectors(ran[name]) for name in EXACT if name in ran), {})

    def speed_of(outcome: Outcome) -> Speed:
        median, vectors = outcome.median, _vectors(outcome)
        calls = [seconds for encoded in outcome.rounds for seconds in encoded.seconds]
        p50, p99 = np.percentile(calls, (50, 99)) * 1000
        return Speed(
            texts_per_second=len(lengths) / median,
            tokens_per_second=sum(lengths) / median,
            ratio=reference / median if reference else None,
            peak_mib=max(encoded.peak_bytes for encoded in outcome.rounds) / 2**20,
            dense=worst_cosine(vectors, exact, "dense"),
            colbert=worst_cosine(vectors, exact, "colbert"),
            p50_ms=float(p50),
            p99_ms=float(p99),
            rounds=outcome.seconds,
        )

    rows = []
    for outcome in outcomes:
        speed, failure = None, outcome.failure
        try:
            speed = speed_of(outcome) if outcome.measured else None
        except ValueError as error:
            failure = str(error)
        about = (outcome.name, outcome.version, str(outcome.setting), outcome.contender.dense_only)
        rows.append(Row(*about, failure, speed))
    return rows


def _vectors(outcome: Outcome) -> Arrays:
    with np.load(outcome.vectors) as arrays:
        return dict(arrays)


def worst_cosine(one: Arrays, other: Arrays, kind: str) -> float | None:
    """Of unit vectors in the same order; None where either has none of that kind.

    Raises `ValueError` where an answer does not hold a vector for each of what it was given.
    """
    if kind not in one or kind not in other:
        return None
    if one[kind].shape != other[kind].shape:
        shapes = f"{one[kind].shape} instead of {other[kind].shape}"
        raise ValueError(f"its {kind} vectors are {shapes}")
    return float(np.einsum("nw,nw->n", one[kind], other[kind]).min())


def format_table(rows: Sequence[Row]) -> str:
    """One line for each row, and why an engine did not run."""
    heads = ("engine", "setting", *_FIGURES, "rounds, seconds")
    reasons = [f"- {row.engine} did not run: {row.failure}" for row in rows if row.speed is None]
    return "\n".join([markdown(heads, map(_cells, rows)), "", *reasons]).rstrip()


def _cells(row: Row) -> list[str]:
    name, speed = row.engine + (", dense only" if row.dense_only else ""), row.speed
    if speed is None:
        return [name, row.setting, *["-"] * len(_FIGURES), "did not run"]
    figures = [(getattr(speed, field), form) for field, form in _FIGURES.values()]
    cells = ["-" if value is None else format(value, form) for value, form in figures]
    return [name, row.setting, *cells, ", ".join(f"{seconds:.2f}" for seconds in speed.rounds)]

"""From outcomes to the figures of the table and of the JSON file."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.adapters.interface import FloatArray
from benchmarks.ceiling import Encoder
from benchmarks.comparison import EXACT, REFERENCES, Ceilings, Outcome
from tools.table import markdown

Arrays = Mapping[str, FloatArray]

_COLUMNS = (
    *("engine", "setting", "texts/s", "tokens/s", "ratio", "of ceiling", "peak MiB"),
    *("dense cosine", "ColBERT cosine", "P50 ms", "P99 ms", "rounds, seconds"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """The tokens of each text, and the model that reads them."""

    lengths: list[int]
    encoder: Encoder


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured of one engine; None where there is nothing to compare with.

    `ratio` is to the faster FlagEmbedding, `share` of the machine's ceiling in the same precision;
    `dense` and `colbert` are the worst cosine of a text and of a token to float32; `p50_ms` and
    `p99_ms` are of single calls; `rounds` are seconds of the whole workload.
    """

    texts_per_second: float
    tokens_per_second: float
    ratio: float | None
    share: float | None
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


class OtherVectorsError(ValueError):
    """An engine's answer does not hold a vector for each of what it was given."""


class Figures:
    """Makes the rows; `vectors_file` tells where an outcome's vectors are."""

    def __init__(
        self,
        outcomes: Mapping[str, Outcome],
        work: Work,
        ceilings: Ceilings,
        vectors_file: Callable[[Outcome], Path],
    ) -> None:
        self._outcomes = outcomes
        self._work = work
        self._ceilings = ceilings
        self._vectors_file = vectors_file
        self._reference = min((one.median for one in self._ran(REFERENCES)), default=None)
        exact = next(iter(self._ran(EXACT)), None)
        self._exact = self._vectors(exact) if exact else {}

    def rows(self) -> list[Row]:
        """In the order of the outcomes."""
        return [self._row(outcome) for outcome in self._outcomes.values()]

    def _ran(self, names: Iterable[str]) -> list[Outcome]:
        known = (self._outcomes[name] for name in names if name in self._outcomes)
        return [outcome for outcome in known if outcome.measured]

    def _vectors(self, outcome: Outcome) -> Arrays:
        with np.load(self._vectors_file(outcome)) as arrays:
            return dict(arrays)

    def _row(self, outcome: Outcome) -> Row:
        speed, failure = None, outcome.failure
        try:
            speed = self._speed(outcome) if outcome.measured else None
        except OtherVectorsError as error:
            failure = str(error)
        return Row(
            engine=outcome.name,
            version=outcome.version,
            setting=str(outcome.setting or ""),
            dense_only=outcome.contender.dense_only,
            failure=failure,
            speed=speed,
        )

    def _speed(self, outcome: Outcome) -> Speed:
        median, vectors, lengths = outcome.median, self._vectors(outcome), self._work.lengths
        p50, p99 = np.percentile(outcome.call_seconds, (50, 99))
        flop = self._work.encoder.flop(lengths, heads=not outcome.contender.dense_only)
        ceiling = self._ceilings.get(outcome.contender.precision)
        return Speed(
            texts_per_second=len(lengths) / median,
            tokens_per_second=sum(lengths) / median,
            ratio=self._reference / median if self._reference else None,
            share=flop / median / ceiling if ceiling else None,
            peak_mib=outcome.peak_bytes / 2**20,
            dense=worst_cosine(vectors, self._exact, "dense"),
            colbert=worst_cosine(vectors, self._exact, "colbert"),
            p50_ms=float(p50) * 1000,
            p99_ms=float(p99) * 1000,
            rounds=outcome.seconds,
        )


def median_ceilings(rounds: Iterable[Ceilings]) -> Ceilings:
    """The median of the rounds, in each precision."""
    found: dict[str, list[float]] = {}
    for ceilings in rounds:
        for precision, rate in ceilings.items():
            found.setdefault(precision, []).append(rate)
    return {precision: statistics.median(rates) for precision, rates in found.items()}


def worst_cosine(one: Arrays, other: Arrays, kind: str) -> float | None:
    """Of unit vectors in the same order; None where either has none of that kind."""
    if kind not in one or kind not in other:
        return None
    if one[kind].shape != other[kind].shape:
        shapes = f"{one[kind].shape} instead of {other[kind].shape}"
        raise OtherVectorsError(f"its {kind} vectors are {shapes}")
    return float(np.einsum("nw,nw->n", one[kind], other[kind]).min())


def format_table(rows: Sequence[Row]) -> str:
    """One line for each row, and why an engine did not run."""
    reasons = [f"- {row.engine} did not run: {row.failure}" for row in rows if row.speed is None]
    return "\n".join([markdown(_COLUMNS, map(_cells, rows)), "", *reasons]).rstrip()


def _cells(row: Row) -> list[str]:
    name, speed = row.engine + (", dense only" if row.dense_only else ""), row.speed
    if speed is None:
        return [name, row.setting, *["-"] * (len(_COLUMNS) - 3), "did not run"]
    figures = (
        (speed.texts_per_second, ".2f"),
        (speed.tokens_per_second, ".0f"),
        (speed.ratio, ".2f"),
        (speed.share, ".0%"),
        (speed.peak_mib, ".0f"),
        (speed.dense, ".6f"),
        (speed.colbert, ".6f"),
        (speed.p50_ms, ".1f"),
        (speed.p99_ms, ".1f"),
    )
    cells = ["-" if value is None else format(value, form) for value, form in figures]
    return [name, row.setting, *cells, ", ".join(f"{seconds:.2f}" for seconds in speed.rounds)]

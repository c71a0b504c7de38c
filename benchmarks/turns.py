"""Engines taking turns on one workload, because the speed of a shared machine drifts."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from app.jobs import FloatArray

# Texts to unit vectors [N, width], or to scores [N].
Compute = Callable[[list[str]], FloatArray]


@dataclass(slots=True)
class Measured:
    """One engine's seconds, round by round, and the results of its last round."""

    seconds: list[float] = field(default_factory=list)
    results: FloatArray | None = None

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)


def measure(engines: dict[str, Compute], texts: list[str], rounds: int) -> dict[str, Measured]:
    """Run every engine `rounds` times in turn, after a short run that is not counted."""
    measured = {name: Measured() for name in engines}
    for compute in engines.values():
        compute(texts[:8])
    for _ in range(rounds):
        for name, compute in engines.items():
            started = time.perf_counter()
            measured[name].results = compute(texts)
            measured[name].seconds.append(time.perf_counter() - started)
    return measured


def print_table(measured: dict[str, Measured], count: int, unit: str) -> None:
    """One row for each engine; ratios and agreement are against the last, the reference.

    Agreement is the worst cosine of vectors, or the largest difference of scores.
    """
    reference = list(measured.values())[-1]
    print(f"{'Engine':26}{unit:>10}{'Ratio':>8}{'Agreement':>12}  Rounds (s)")
    for name, one in measured.items():
        rounds = " ".join(f"{value:.2f}" for value in one.seconds)
        agreement = _agreement(one, reference)
        ratio = reference.median / one.median
        print(f"{name:26}{count / one.median:10.2f}{ratio:8.2f}{agreement:12.6f}  {rounds}")


def _agreement(one: Measured, other: Measured) -> float:
    if one.results is None or other.results is None:
        raise ValueError("an engine was not measured")
    if one.results.ndim == 1:
        return float(np.abs(one.results - other.results).max())
    return float((one.results * other.results).sum(axis=1).min())

"""Engines taking turns on one workload, because the speed of a shared machine drifts."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from smart_embedder.engine.records import FloatArray

# Passages to scores [N].
Compute = Callable[[list[str]], FloatArray]


@dataclass(slots=True)
class Measured:
    """One engine's seconds, round by round, and the scores of its last round."""

    seconds: list[float] = field(default_factory=list)
    scores: FloatArray | None = None

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)


def turns(rounds: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """(round, name) in the order A B C A B C; a name leaves when its rounds are over."""
    for number in range(max(rounds.values(), default=0)):
        for name, wanted in rounds.items():
            if number < wanted:
                yield number, name


def measure(engines: dict[str, Compute], texts: list[str], rounds: int) -> dict[str, Measured]:
    """Run every engine `rounds` times in turn, after a short run that is not counted."""
    measured = {name: Measured() for name in engines}
    for compute in engines.values():
        compute(texts[:8])
    for _, name in turns(dict.fromkeys(engines, rounds)):
        started = time.perf_counter()
        measured[name].scores = engines[name](texts)
        measured[name].seconds.append(time.perf_counter() - started)
    return measured


def print_table(measured: dict[str, Measured], count: int, unit: str) -> None:
    """One row for each engine; ratios and differences are against the last, the reference."""
    reference = list(measured.values())[-1]
    print(f"{'Engine':26}{unit:>10}{'Ratio':>8}{'Difference':>12}  Rounds (s)")
    for name, one in measured.items():
        rounds = " ".join(f"{value:.2f}" for value in one.seconds)
        ratio = reference.median / one.median
        difference = _largest_difference(one, reference)
        print(f"{name:26}{count / one.median:10.2f}{ratio:8.2f}{difference:12.6f}  {rounds}")


def _largest_difference(one: Measured, other: Measured) -> float:
    if one.scores is None or other.scores is None:
        raise ValueError("an engine was not measured")
    return float(np.abs(one.scores - other.scores).max())

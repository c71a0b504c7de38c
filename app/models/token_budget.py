"""Chooses the token budget of one forward from measurements, where MAX_BATCH_TOKENS is auto.

Small batches keep latency low; large ones keep the matrix units busy. The budget is the smallest
whose throughput is within 3 % of the best that was seen, at least what dashboards and clients were
minimum for a machine of this size, and never more than fits the memory with a margin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

_CLOSE_TO_BEST = 0.97
_SHORT_LENGTH = 512
_CPU_LEAST = 512
_GIB = 2**30
# (GPU memory above, sequences of full length), largest first; the last is for what has less.
_LONG_TABLE = ((8 * _GIB, 12), (4 * _GIB, 6), (0, 3))
_SHORT_TABLE = ((8 * _GIB, 128), (6 * _GIB, 64), (4 * _GIB, 32), (0, 16))


@dataclass(frozen=True, slots=True)
class Measurement:
    """A forward of `tokens` took `seconds`."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens in a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class ChosenBudget:
    """How many tokens one forward may hold, why, and the seconds that a token takes then."""

    tokens: int
    reason: str
    seconds_per_token: float


def minimum_tokens(length: int, memory_bytes: int | None) -> int:
    """The least budget for texts of `length` tokens on a GPU with such a memory; None is a CPU.

    On a CPU a long text goes alone, whatever the budget is; what counts there is that a busy moment
    at the start must not leave it with batches too small for its matrix units for good.
    """
    table = _SHORT_TABLE if length <= _SHORT_LENGTH else _LONG_TABLE
    if memory_bytes is None:
        return max(_CPU_LEAST, table[-1][1] * length if length <= _SHORT_LENGTH else 0)
    sequences = next(count for above, count in table if memory_bytes > above)
    return sequences * length


def choose_budget(
    measured: Sequence[Measurement],
    minimum: int,
    most: int | None = None,
    longest: float = math.inf,
) -> ChosenBudget:
    """The budget from forwards of growing size; `most` is what the memory holds, where known.

    It is raised to the `minimum` as far as a forward takes no more than `longest` seconds.
    """
    best = max(measured, key=lambda one: one.rate)
    close = next(one for one in measured if one.rate >= _CLOSE_TO_BEST * best.rate)
    tokens = close.tokens
    reason = f"the smallest within 3 % of the best, {best.rate:.0f} tokens/s at {best.tokens}"
    in_time = int(min(minimum, longest * close.rate))
    if tokens < in_time:
        tokens, reason = in_time, "the least that is promised for this length and memory"
        if in_time < minimum:
            reason = f"what takes {longest:g} seconds, less than is promised for this memory"
    return capped(ChosenBudget(tokens, reason, seconds_per_token=1 / close.rate), most)


def capped(budget: ChosenBudget, most: int | None) -> ChosenBudget:
    """The budget, lowered to `most` tokens, which the memory holds."""
    if most is None or budget.tokens <= most:
        return budget
    return replace(budget, tokens=max(1, most), reason="what fits the memory")


def named_or_chosen(budget: ChosenBudget, named: int | Literal["auto"]) -> ChosenBudget:
    """The budget that was chosen, or the one that MAX_BATCH_TOKENS names."""
    if named == "auto":
        return budget
    return replace(budget, tokens=named, reason="MAX_BATCH_TOKENS")

"""The load to plan for: when requests come, and how long their texts are."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


class LoadError(Exception):
    """The load is not described as it should be; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, in seconds, whose it is, and the tokens of each of its texts."""

    time: float
    client: str
    lengths: tuple[int, ...]


Lengths = Callable[[np.random.Generator, int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of `texts` texts each, `rate` a second, independent of one another (Poisson).

    `draw_lengths` draws the tokens of texts; the requests are those of `clients` in equal parts.
    """

    rate: float
    draw_lengths: Lengths
    texts: int = 1
    clients: int = 8

    def arrivals(self, count: int, seed: int = 0) -> Iterator[Arrival]:
        """The first `count` requests; the same ones for the same seed."""
        random = np.random.default_rng(seed)
        time = 0.0
        for _ in range(count):
            time += random.exponential(1 / self.rate)
            lengths = tuple(int(each) for each in self.draw_lengths(random, self.texts))
            yield Arrival(time, str(random.integers(self.clients)), lengths)


def parse_lengths(described: str) -> Lengths:
    """What draws the lengths that are described: `30`, `20:200`, or `30*9,2000` (nine times 30).

    Raises `LoadError` where it is none of these.
    """
    low, colon, high = described.partition(":")
    try:
        if colon:
            return uniform(int(low), int(high))
        return drawn_from([_weighted(part) for part in described.split(",")])
    except ValueError:
        raise LoadError(
            f"{described!r} is no distribution of tokens: 30, 20:200 or 30*9,2000*1"
        ) from None


def _weighted(part: str) -> tuple[int, float]:
    length, _, weight = part.partition("*")
    return int(length), float(weight or 1)


def uniform(low: int, high: int) -> Lengths:
    """Lengths between `low` and `high`, all equally often; raises `ValueError`."""
    if not 0 < low <= high:
        raise ValueError
    return lambda random, count: random.integers(low, high + 1, count).tolist()


def drawn_from(weighted: Sequence[tuple[int, float]]) -> Lengths:
    """Lengths as often as their weights say; raises `ValueError`."""
    lengths, weights = np.array(weighted, np.float64).T
    if lengths.min() < 1 or weights.min() < 0 or not weights.sum():
        raise ValueError
    shares = weights / weights.sum()
    return lambda random, count: random.choice(lengths.astype(int), count, p=shares).tolist()

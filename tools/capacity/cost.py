"""The load to plan for, and what a request costs: measured times and the model fitted to them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from scipy.optimize import nnls

from tools.service import first_problem

Lengths = Callable[[np.random.Generator, int], Sequence[int]]


class PlanError(Exception):
    """Nothing can be planned: of a load, times or a service; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, in seconds, whose it is, and the tokens of each of its texts."""

    time: float
    client: str
    lengths: tuple[int, ...]


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

    Raises `PlanError` where it is none of these.
    """
    low, colon, high = described.partition(":")
    try:
        if colon:
            return uniform(int(low), int(high))
        parts = (part.partition("*") for part in described.split(","))
        return drawn_from([(int(length), float(weight or 1)) for length, _, weight in parts])
    except ValueError:
        raise PlanError(
            f"{described!r} is no distribution of tokens: 30, 20:200 or 30*9,2000*1"
        ) from None


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


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """A request alone in the service: texts of `tokens` each, and where its seconds went.

    `forward` is the device's part and `tokenize` what comes before it; `rest` is everything else:
    rendering, HTTP, and the way to the client.
    """

    texts: int
    tokens: int
    forward: float
    tokenize: float
    rest: float


@dataclass(frozen=True, slots=True)
class TimeTable:
    """The times of one device, and how its service forms batches.

    `overlapping` says that a batch is launched while the one before is computed, as on a GPU;
    otherwise short requests may preempt a long forward. `interference` is by how many seconds a
    request that is received and answered beside a forward makes it longer.
    """

    kinds: str
    device: str
    max_batch_tokens: int
    overlapping: bool
    times: list[MeasuredTime]
    interference: float = 0.0

    def write(self, path: Path) -> None:
        """Write it as JSON, for `read_times` here or on another machine."""
        path.write_bytes(_TABLES.dump_json(self, indent=1) + b"\n")


_TABLES = TypeAdapter(TimeTable)


def read_times(path: Path) -> TimeTable:
    """The table in a file; raises `PlanError`."""
    try:
        return _TABLES.validate_json(path.read_bytes())
    except OSError as error:
        raise PlanError(f"{path} holds no times of this tool: {error.strerror}") from None
    except ValidationError as error:
        raise PlanError(f"{path} holds no times of this tool: {first_problem(error)}") from None


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a forward, of tokenising before it, and of the rest of an answer.

    A forward costs something by itself, for each text, for each token, and for each pair of tokens
    of a text, by which attention grows; tokenising and the rest something by themselves and for
    each text and token.
    """

    forward_terms: tuple[float, ...]
    tokenize_terms: tuple[float, ...] = (0.0, 0.0, 0.0)
    rest_terms: tuple[float, ...] = (0.0, 0.0, 0.0)

    def forward(self, lengths: Iterable[int], forwards: int = 1) -> float:
        """Seconds of a forward over sequences of these tokens, or of several over all of them."""
        given = np.fromiter(lengths, np.float64)
        features = (forwards, len(given), given.sum(), float(given @ given))
        return float(np.dot(self.forward_terms, features))

    def tokenize(self, lengths: Sequence[int]) -> float:
        """Seconds before a request is in the queue."""
        return float(np.dot(self.tokenize_terms, (1.0, len(lengths), sum(lengths))))

    def rest(self, lengths: Sequence[int]) -> float:
        """Seconds after a request's last forward."""
        return float(np.dot(self.rest_terms, (1.0, len(lengths), sum(lengths))))


def fit(table: TimeTable) -> CostModel:
    """The model with the least squares of relative errors, no term below zero.

    Raises `PlanError` where nothing was measured.
    """
    if not table.times:
        raise PlanError("there are no times")
    shapes = np.array([(1, each.texts, each.texts * each.tokens) for each in table.times], float)
    pairs = np.array([each.texts * each.tokens**2 for each in table.times], float)

    def terms(name: str, features: Any) -> tuple[float, ...]:
        seconds = np.array([getattr(each, name) for each in table.times])
        # Of what takes next to nothing, the relative error says nothing.
        weights = 1 / np.maximum(seconds, 1e-4)
        found, _ = nnls(features * weights[:, None], seconds * weights)
        return tuple(float(each) for each in found)

    forward = terms("forward", np.column_stack((shapes, pairs)))
    return CostModel(forward, terms("tokenize", shapes), terms("rest", shapes))

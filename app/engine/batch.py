"""A batch: the parts of one or more jobs that one forward runs."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from app.engine.job import Job, Purpose
from app.engine.model import Model
from app.engine.types import Outputs, TokenSequence, join


@dataclass(frozen=True)
class BatchSlice:
    """The part of a batch that belongs to one job: its sequences `start` to `stop`."""

    job: Job
    start: int
    stop: int

    @property
    def count(self) -> int:
        """How many sequences it has."""
        return self.stop - self.start

    @property
    def sequences(self) -> Sequence[TokenSequence]:
        """The token ids of this part."""
        return self.job.sequences[self.start : self.stop]

    @cached_property
    def tokens(self) -> int:
        """Tokens of this part."""
        return sum(map(len, self.sequences))

    def split(self, count: int) -> "tuple[BatchSlice, BatchSlice]":
        """Its first `count` sequences, and the rest."""
        middle = self.start + count
        return BatchSlice(self.job, self.start, middle), BatchSlice(self.job, middle, self.stop)


@dataclass(frozen=True)
class Batch:
    """What one forward runs: slices of one or more jobs for the same model.

    One that is `handed_over` comes from a device that failed while it had it.
    """

    model: Model
    slices: list[BatchSlice]
    handed_over: bool = False

    @cached_property
    def sequences(self) -> list[TokenSequence]:
        """The token ids of every sequence, slice after slice."""
        return [ids for part in self.slices for ids in part.sequences]

    @cached_property
    def outputs(self) -> list[Outputs]:
        """The kinds of vectors that are wanted for each sequence."""
        return [part.job.outputs for part in self.slices for _ in range(part.count)]

    @cached_property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(part.tokens for part in self.slices)

    @cached_property
    def weight(self) -> float:
        """That of its weightiest job."""
        return max((part.job.weight for part in self.slices), default=0.0)

    @cached_property
    def client_tokens(self) -> dict[str, int]:
        """The tokens of each client."""
        tokens: Counter[str] = Counter()
        for part in self.slices:
            tokens[part.job.client] += part.tokens
        return tokens

    @cached_property
    def longest_slices(self) -> dict[str, int]:
        """The tokens of each client's longest slice."""
        longest: dict[str, int] = {}
        for part in self.slices:
            client = part.job.client
            longest[client] = max(longest.get(client, 0), part.tokens)
        return longest

    def count(self, purpose: Purpose) -> int:
        """How many of its sequences serve `purpose`."""
        return sum(part.count for part in self.slices if part.job.purpose is purpose)

    def take(self, now: float) -> None:
        """Mark these sequences as taken in every job."""
        for part in self.slices:
            part.job.take(part.count, now)

    def launch(self, model: Model) -> Callable[[], list[Any]]:
        """Launch the forward, in the device thread; returns a function that waits for its results.

        `model` is the batch's own, or its replica on another device.
        """
        collect = model.launch([join(ids) for ids in self.sequences], self.outputs)
        return lambda: self._reduce(collect())

    def complete(self, results: Sequence[Any], seconds: float) -> None:
        """Give each job its results; the forward took `seconds`."""
        begin = 0
        for part in self.slices:
            part.job.complete(part.start, results[begin : begin + part.count], seconds)
            begin += part.count

    def fail(self, error: Exception) -> None:
        """Fail every job that has a part in it."""
        for part in self.slices:
            part.job.fail(error)

    def unresolved(self) -> "Batch":
        """The slices whose caller still waits."""
        return replace(self, slices=[part for part in self.slices if not part.job.resolved])

    def halves(self) -> "tuple[Batch, Batch]":
        """Its first half, by sequences, and the rest; the first is empty for a single sequence."""
        left = len(self.sequences) // 2
        first: list[BatchSlice] = []
        second: list[BatchSlice] = []
        for part in self.slices:
            count = min(left, part.count)
            left -= count
            for piece, slices in zip(part.split(count), (first, second), strict=True):
                if piece.count:
                    slices.append(piece)
        return replace(self, slices=first), replace(self, slices=second)

    def _reduce(self, results: Sequence[Any]) -> list[Any]:
        reduced: list[Any] = []
        for part in self.slices:
            own = results[len(reduced) : len(reduced) + part.count]
            reduced.extend(_reduce_each(part, own))
        return reduced


def _reduce_each(part: BatchSlice, results: Sequence[Any]) -> Sequence[Any]:
    """Reduce each result; an error in the place of a result stays."""
    reduce = part.job.reduce
    if reduce is None:
        return results
    return [
        each if isinstance(each, Exception) else reduce(place, each)
        for place, each in enumerate(results, part.start)
    ]

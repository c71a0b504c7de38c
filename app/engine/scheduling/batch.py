"""A batch: the slices of one or more jobs that one forward runs."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from app.engine.model import Model
from app.engine.scheduling.job import Job, Purpose
from app.engine.types import Outputs, TokenSequence, join


@dataclass(frozen=True)
class BatchSlice:
    """The share of one job in a batch: its sequences from `start` up to `stop`."""

    job: Job
    start: int
    stop: int

    @property
    def count(self) -> int:
        """The number of its sequences."""
        return self.stop - self.start

    @property
    def sequences(self) -> Sequence[TokenSequence]:
        """The token ids of its sequences."""
        return self.job.sequences[self.start : self.stop]

    @cached_property
    def tokens(self) -> int:
        """The tokens of its sequences."""
        return sum(map(len, self.sequences))

    def split(self, count: int) -> "tuple[BatchSlice, BatchSlice]":
        """Its first `count` sequences, and the rest."""
        middle = self.start + count
        return BatchSlice(self.job, self.start, middle), BatchSlice(self.job, middle, self.stop)


@dataclass(frozen=True)
class Batch:
    """What one forward runs: slices of one or more jobs for the same model.

    `handed_over` says that another device has failed on it.
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
        """The outputs of each sequence."""
        return [part.job.outputs for part in self.slices for _ in range(part.count)]

    @cached_property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(part.tokens for part in self.slices)

    @cached_property
    def weight(self) -> float:
        """The greatest weight of its jobs."""
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
        """The number of its sequences whose job has this purpose."""
        return sum(part.count for part in self.slices if part.job.purpose is purpose)

    def take(self, now: float) -> None:
        """Mark its sequences as taken, in every job."""
        for part in self.slices:
            part.job.take(part.count, now)

    def launch(self, model: Model) -> Callable[[], list[Any]]:
        """Launch the forward, in the device thread; return a function that waits for its results.

        `model` is the batch's own model, or the replica of it on this device.
        """
        collect = model.launch([join(ids) for ids in self.sequences], self.outputs)
        return lambda: self._reduce(collect())

    def complete(self, results: Sequence[Any], seconds: float) -> None:
        """Give each job the results of its sequences; the forward took `seconds`."""
        begin = 0
        for part in self.slices:
            part.job.complete(part.start, results[begin : begin + part.count], seconds)
            begin += part.count

    def fail(self, error: Exception) -> None:
        """Fail every job that has a slice in it."""
        for part in self.slices:
            part.job.fail(error)

    def unresolved(self) -> "Batch":
        """The same batch without the slices of jobs that are resolved."""
        return replace(self, slices=[part for part in self.slices if not part.job.resolved])

    def halves(self) -> "tuple[Batch, Batch]":
        """Two batches of half of its sequences each; the first is empty for a single sequence."""
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
    """Reduce each result; an error in place of a result is kept."""
    reduce = part.job.reduce
    if reduce is None:
        return results
    return [
        each if isinstance(each, Exception) else reduce(place, each)
        for place, each in enumerate(results, part.start)
    ]

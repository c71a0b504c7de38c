"""A batch: the slices of one or more jobs that one forward runs."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from app.engine.model import Model
from app.engine.scheduling.job import Job, Purpose
from app.engine.types import Outputs, TextEmbedding, TokenSequence, join


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
        return [ids for each in self.slices for ids in each.sequences]

    @cached_property
    def outputs(self) -> list[Outputs]:
        """The outputs of each sequence."""
        return [each.job.outputs for each in self.slices for _ in range(each.count)]

    @cached_property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(each.tokens for each in self.slices)

    @cached_property
    def weight(self) -> float:
        """The greatest weight of its jobs."""
        return max((each.job.weight for each in self.slices), default=0.0)

    @cached_property
    def client_tokens(self) -> dict[str, int]:
        """The tokens of each client."""
        tokens: Counter[str] = Counter()
        for batch_slice in self.slices:
            tokens[batch_slice.job.client] += batch_slice.tokens
        return tokens

    @cached_property
    def longest_slices(self) -> dict[str, int]:
        """The tokens of each client's longest slice."""
        longest: dict[str, int] = {}
        for batch_slice in self.slices:
            client = batch_slice.job.client
            longest[client] = max(longest.get(client, 0), batch_slice.tokens)
        return longest

    def count(self, purpose: Purpose) -> int:
        """The number of its sequences whose job has this purpose."""
        return sum(each.count for each in self.slices if each.job.purpose is purpose)

    def take(self, now: float) -> None:
        """Mark its sequences as taken, in every job."""
        for batch_slice in self.slices:
            batch_slice.job.take(batch_slice.count, now)

    def launch(self, model: Model) -> Callable[[], list[Any]]:
        """Launch the forward, in the device thread; return a function that waits for its results.

        `model` is the batch's own model, or the replica of it on this device.
        """
        collect = model.launch([join(ids) for ids in self.sequences], self.outputs)
        return lambda: self._reduce(collect())

    def complete(self, results: Sequence[Any], seconds: float) -> None:
        """Give each job the results of its sequences; the forward took `seconds`."""
        begin = 0
        for batch_slice in self.slices:
            batch_slice.job.complete(
                batch_slice.start, results[begin : begin + batch_slice.count], seconds
            )
            begin += batch_slice.count

    def fail(self, error: Exception) -> None:
        """Fail every job that has a slice in it."""
        for batch_slice in self.slices:
            batch_slice.job.fail(error)

    def unresolved(self) -> "Batch":
        """The same batch without the slices of jobs that are resolved."""
        slices = [each for each in self.slices if not each.job.resolved]
        return self if len(slices) == len(self.slices) else replace(self, slices=slices)

    def halves(self) -> "tuple[Batch, Batch]":
        """Two batches of half of its sequences each; the first is empty for a single sequence."""
        left = len(self.sequences) // 2
        first: list[BatchSlice] = []
        second: list[BatchSlice] = []
        for batch_slice in self.slices:
            count = min(left, batch_slice.count)
            left -= count
            for piece, slices in zip(batch_slice.split(count), (first, second), strict=True):
                if piece.count:
                    slices.append(piece)
        return replace(self, slices=first), replace(self, slices=second)

    def _reduce(self, results: Sequence[Any]) -> list[Any]:
        """What each job keeps of its results, of which none keeps those of another one alive."""
        reduced: list[Any] = []
        for batch_slice in self.slices:
            own = results[len(reduced) : len(reduced) + batch_slice.count]
            reduced.extend(_reduce_each(batch_slice, own))
        if len(self.slices) == 1:
            return reduced
        return [
            each.copy() if isinstance(each, TextEmbedding | np.ndarray) else each
            for each in reduced
        ]


def _reduce_each(batch_slice: BatchSlice, results: Sequence[Any]) -> Sequence[Any]:
    """Reduce each result; an error in place of a result is kept."""
    reduce = batch_slice.job.reduce
    if reduce is None:
        return results
    return [
        each if isinstance(each, Exception) else reduce(index, each)
        for index, each in enumerate(results, batch_slice.start)
    ]

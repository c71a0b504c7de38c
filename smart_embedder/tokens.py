"""Tokenized texts and pairs, and how many of their tokens were cut."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A tokenized text: `ids` with special tokens, cut to the model's limit.

    `original_tokens` is the number of tokens before the cut, or a lower bound unless `exact`.
    """

    ids: TokenIds
    original_tokens: int
    exact: bool = True

    @property
    def truncated(self) -> bool:
        """True if tokens were cut."""
        return self.original_tokens > len(self.ids)


class ArrayTokens(np.ndarray[Any, np.dtype[np.int64]]):
    """Token ids, `[tokens]`, and the `arrays` that a model reads with them.

    A copy or a slice has no `arrays`.
    """

    arrays: Mapping[str, npt.NDArray[Any]] = {}

    @classmethod
    def of(cls, ids: TokenIds, arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Join the ids and the arrays, neither of which is copied."""
        tokens = ids.view(cls)
        tokens.arrays = arrays
        return tokens

    @property
    def array_bytes(self) -> int:
        """The size of the arrays in bytes."""
        return sum(array.nbytes for array in self.arrays.values())


class ImageTokens(ArrayTokens):
    """The tokens of a picture; where a model reads no ids of a picture, all are 0."""


class JoinedIds:
    """Token ids in two parts, joined only when a model reads them.

    All pairs of a query share the first part, instead of a copy for each passage.
    """

    __slots__ = ("_first", "_length", "_second")

    def __init__(self, first: TokenIds, second: TokenIds) -> None:
        self._first = first
        self._second = second
        self._length = len(first) + len(second)

    def __len__(self) -> int:
        return self._length

    def join(self) -> TokenIds:
        """Return all ids, `[tokens]`."""
        return np.concatenate((self._first, self._second))


TokenSequence = TokenIds | JoinedIds


def join(sequence: TokenSequence) -> TokenIds:
    """Return the ids of a sequence as one array, `[tokens]`."""
    return sequence.join() if isinstance(sequence, JoinedIds) else sequence


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The number of tokens of a text, a lower bound unless `exact`, and of those that are kept."""

    total: int
    kept: int
    exact: bool = True

    @property
    def truncated(self) -> bool:
        """True if tokens were cut."""
        return self.total > self.kept


@dataclass(frozen=True, slots=True)
class TokenizedPair:
    """A query tokenized with a passage, and the tokens of each before and after the cut."""

    sequence: TokenSequence
    query: TokenCount
    passage: TokenCount

    @property
    def ids(self) -> TokenIds:
        """The ids of query and passage with special tokens; a new array each time."""
        return join(self.sequence)


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """The tokens of a text, without special tokens.

    Token `ids[i]` spans the characters from `starts[i]` to `stops[i]`. All arrays are `[tokens]`
    int64.
    """

    ids: TokenIds
    starts: TokenIds
    stops: TokenIds


@dataclass(frozen=True, slots=True)
class TextWindows:
    """A text in windows, overlapping slices of its tokens, which a model reads one by one.

    `sequences` are the token ids of the windows, with special tokens.
    """

    spans: TokenSpans
    windows: list[slice]
    sequences: list[TokenIds]


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that a model reads before or after every text."""

    id: int
    string: str

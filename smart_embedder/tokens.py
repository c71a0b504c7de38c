"""Texts as models read them: token ids, and how many were cut."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as the model reads it: `ids` with special tokens, cut to the model's limit.

    `original_tokens` is its number of tokens uncut, or a lower bound where not `exact`.
    """

    ids: TokenIds
    original_tokens: int
    exact: bool = True

    @property
    def truncated(self) -> bool:
        """Whether tokens were cut off."""
        return self.original_tokens > len(self.ids)


class JoinedIds:
    """Token ids in two parts, joined where a model reads them.

    The pairs of one query share the first part, which would be copied for each passage otherwise.
    """

    __slots__ = ("_first", "_length", "_second")

    def __init__(self, first: TokenIds, second: TokenIds) -> None:
        self._first = first
        self._second = second
        self._length = len(first) + len(second)

    def __len__(self) -> int:
        return self._length

    def join(self) -> TokenIds:
        """All of them, `[tokens]`."""
        return np.concatenate((self._first, self._second))


TokenSequence = TokenIds | JoinedIds


def join(sequence: TokenSequence) -> TokenIds:
    """The ids of a sequence as one array, `[tokens]`."""
    return sequence.join() if isinstance(sequence, JoinedIds) else sequence


@dataclass(frozen=True, slots=True)
class TokenizedPair:
    """A query and a passage as a reranker reads them together, and how much of each it reads.

    Where not `query_exact` or `passage_exact`, its number of tokens is a lower bound.
    """

    sequence: TokenSequence
    query_tokens: int
    query_kept: int
    passage_tokens: int
    passage_kept: int
    query_exact: bool = True
    passage_exact: bool = True

    @property
    def ids(self) -> TokenIds:
        """The ids of both with special tokens, joined anew each time."""
        return join(self.sequence)


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """Tokens of a text without special ones: token `i` is `ids[i]`.

    It stands for the characters of the text from `starts[i]` to `stops[i]`. All are `[tokens]`
    int64.
    """

    ids: TokenIds
    starts: TokenIds
    stops: TokenIds


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that a model reads before or after every text."""

    id: int
    string: str

"""Position ids: how a transformer numbers the tokens of each sequence in a packed row."""

from dataclasses import dataclass

import numpy as np

from app.engine.types import TokenIds
from app.models.batch.arrays import Indices
from app.models.batch.marks import SECOND_SEGMENT, marked


@dataclass(frozen=True, slots=True)
class PositionScheme:
    """Positions count from 0 in each sequence, or as RoBERTa's do.

    RoBERTa's count from `roberta_padding` + 1, its padding id; a padding token that a text spells
    out stays at `roberta_padding`. Tokens that are marked as of the second segment have
    `segment_offset` added, if it is not 0.
    """

    roberta_padding: int | None = None
    segment_offset: int = 0

    def position_ids(self, ids: TokenIds, marked_ids: TokenIds, offsets: Indices) -> Indices:
        """`[T]`, of sequences that begin at `offsets` `[N + 1]`, of which the last one is T.

        `ids` `[T]` are without the marks of `marked_ids` `[T]`.
        """
        padding = self.roberta_padding
        if padding is None:
            positions = _count(np.ones_like(ids), offsets) - 1
        else:
            real = (ids != padding).astype(np.int64)
            positions = _count(real, offsets) * real + padding
        if self.segment_offset:
            positions += self.segment_offset * marked(marked_ids, SECOND_SEGMENT)
        return positions


def _count(flags: Indices, offsets: Indices) -> Indices:
    """Running count of the set `flags`, begun anew at every offset."""
    running = np.cumsum(flags)
    before = np.concatenate(([0], running))[offsets[:-1]]
    counted: Indices = running - np.repeat(before, np.diff(offsets))
    return counted

"""Marks of single tokens, in upper bits of their ids.

A sequence is one array of ids from its tokenizer to the forward, so that the queue, the batcher and
the device threads need not know what some models read beside ids.
"""

import numpy as np
import numpy.typing as npt

from app.engine.types import TokenIds

_ID_BITS = 28
_IDS = (1 << _ID_BITS) - 1
# A token of the second text of a pair, to which BERT adds another type embedding.
SECOND_SEGMENT = 1 << _ID_BITS
# A token at the end of its sequence to which no token attends, not even itself.
UNATTENDED = SECOND_SEGMENT << 1
# A token without a ColBERT vector.
WITHOUT_VECTOR = UNATTENDED << 1


def without_marks(ids: TokenIds) -> TokenIds:
    """The ids alone."""
    return ids & _IDS


def marked(ids: TokenIds, mark: int) -> npt.NDArray[np.bool_]:
    """Which tokens have the mark."""
    return np.bitwise_and(ids, mark).astype(np.bool_)

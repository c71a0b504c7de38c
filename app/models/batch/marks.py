"""What a model is told of single tokens beside their ids: the upper bits of 31.

A sequence travels from its tokenizer to the forward as one array of ids, so that the queue, the
batcher and the device threads need not know what some models read beside them.
"""

import numpy as np
import numpy.typing as npt

from app.engine.types import TokenIds

_ID_BITS = 28
_IDS = (1 << _ID_BITS) - 1
# Of the second text of a pair, which BERT adds another embedding to.
SECOND_SEGMENT = 1 << _ID_BITS
# Which no token attends to, itself included; it stands behind all others of its sequence.
UNATTENDED = SECOND_SEGMENT << 1
# Of which no vector is made.
WITHOUT_VECTOR = UNATTENDED << 1


def without_marks(ids: TokenIds) -> TokenIds:
    """The ids alone."""
    return ids & _IDS


def marked(ids: TokenIds, mark: int) -> npt.NDArray[np.bool_]:
    """Which tokens have the mark."""
    return np.bitwise_and(ids, mark).astype(np.bool_)

"""What a model is told of single tokens beside their ids: bits above the 32 of an id.

A sequence travels from its tokenizer to the forward as one array of ids, so that the queue, the
batcher and the device threads need not know what some models read beside them.
"""

import numpy as np
import numpy.typing as npt

from app.engine.types import TokenIds

_ID_BITS = 32
_IDS = (1 << _ID_BITS) - 1
# Of the second text of a pair, which BERT adds another embedding to.
SECOND_SEGMENT = 1 << _ID_BITS


def without_marks(ids: TokenIds) -> TokenIds:
    """The ids alone."""
    return ids & _IDS


def marked(ids: TokenIds, mark: int) -> npt.NDArray[np.bool_]:
    """Which tokens have the mark."""
    return np.bitwise_and(ids, mark).astype(np.bool_)

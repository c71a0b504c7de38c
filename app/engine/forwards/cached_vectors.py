"""The entry of a cache: one kind of vectors of one text, and the tokens behind them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from app.engine.types import Outputs, SparseVector, TextEmbedding, TokenizedText

Array = npt.NDArray[Any]

KINDS: Final = ("dense", "sparse", "colbert", "states")
# Python's objects around the arrays of an entry, and its places in the cache's dictionaries.
_OVERHEAD_BYTES = 1200


@dataclass(frozen=True, slots=True)
class CachedVectors:
    """One kind of vectors of one text: read-only `arrays` by name.

    `ids` are the tokens that were read, int32 `[tokens]`; the rest is as in `TokenizedText`.
    """

    ids: npt.NDArray[np.int32]
    original_tokens: int
    exact: bool
    arrays: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes."""
        arrays = sum(array.nbytes for array in self.arrays.values())
        return arrays + self.ids.nbytes + _OVERHEAD_BYTES

    def copied(self) -> "CachedVectors":
        """A copy of the entry, whose arrays may be views of the results of a whole batch."""
        arrays = {name: read_only(array.copy()) for name, array in self.arrays.items()}
        return CachedVectors(read_only(self.ids.copy()), self.original_tokens, self.exact, arrays)


def kinds_of(outputs: Outputs) -> list[str]:
    """The names of the kinds that are wanted."""
    return [kind for kind in KINDS if getattr(outputs, kind)]


def split(text: TokenizedText, embedding: TextEmbedding) -> dict[str, CachedVectors]:
    """An entry for each kind of vectors of a text."""
    ids = read_only(text.ids.astype(np.int32))
    arrays: dict[str, dict[str, Array]] = {
        kind: {kind: read_only(vectors)}
        for kind in ("dense", "colbert", "states")
        if (vectors := getattr(embedding, kind)) is not None
    }
    if embedding.sparse is not None:
        indices, values = read_only(embedding.sparse.indices), read_only(embedding.sparse.values)
        arrays["sparse"] = {"indices": indices, "values": values}
    return {
        kind: CachedVectors(ids, text.original_tokens, text.exact, own)
        for kind, own in arrays.items()
    }


def join(entries: Mapping[str, CachedVectors]) -> tuple[TokenizedText, TextEmbedding]:
    """The inverse of `split`, for at least one entry."""
    first = next(iter(entries.values()))
    arrays = {name: array for each in entries.values() for name, array in each.arrays.items()}
    sparse = SparseVector(arrays["indices"], arrays["values"]) if "sparse" in entries else None
    return (
        TokenizedText(first.ids.astype(np.int64), first.original_tokens, first.exact),
        TextEmbedding(
            dense=arrays.get("dense"),
            sparse=sparse,
            colbert=arrays.get("colbert"),
            states=arrays.get("states"),
        ),
    )


def read_only(array: Array) -> Array:
    """A read-only view of the array."""
    view = array.view()
    view.flags.writeable = False
    return view

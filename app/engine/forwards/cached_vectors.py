"""The entry of a cache: one kind of vectors of one text, and the tokens behind them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from app.engine.model import Embedder
from app.engine.types import Outputs, SparseVector, TextEmbedding, TokenizedText

Array = npt.NDArray[Any]

KINDS: Final = ("dense", "sparse", "colbert", "states")
# Python's objects around the arrays of an entry, and its places in the cache's dictionaries.
_OVERHEAD_BYTES = 1200
# Of unit length, in any number format that is sent.
_LENGTH_TOLERANCE = 0.01
# Above every vocabulary; the upper bits of `ids` are marks.
_MOST_TOKEN_IDS = 1 << 28


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


def of_one_text(entries: Iterable[CachedVectors]) -> bool:
    """Whether all of them are of the same tokens, as the kinds of one text are."""
    first, *others = entries
    return all(
        each.original_tokens == first.original_tokens
        and each.exact == first.exact
        and each.ids.tobytes() == first.ids.tobytes()
        for each in others
    )


def problem_of(entry: CachedVectors, kind: str, model: Embedder) -> str | None:
    """Why an entry of this kind cannot be what `model` makes of a text; None where it can.

    Its arrays have the types and the numbers of dimensions of the kind.
    """
    if (entry.ids < 0).any() or entry.original_tokens < len(entry.ids):
        return "its tokens are not those of a text"
    if not all(np.isfinite(array).all() for array in entry.arrays.values()):
        return "a number is not finite"
    if kind == "sparse":
        return _problem_of_weights(entry.arrays["indices"], entry.arrays["values"])
    return _problem_of_rows(np.atleast_2d(entry.arrays[kind]), entry.ids, kind, model)


def _problem_of_weights(indices: Array, values: Array) -> str | None:
    if indices.shape != values.shape:
        return "there is not one weight for each index"
    if not ((indices >= 0) & (indices < _MOST_TOKEN_IDS)).all() or (np.diff(indices) <= 0).any():
        return "the indices are not ascending token ids"
    return None if (values > 0).all() else "a weight is not above zero"


def _problem_of_rows(
    rows: Array, ids: npt.NDArray[np.int32], kind: str, model: Embedder
) -> str | None:
    wanted = {
        "dense": (1, model.dense_width),
        "colbert": (len(model.colbert_tokens(ids.astype(np.int64))), model.colbert_width),
        "states": (len(ids), model.states_width),
    }[kind]
    if rows.shape != wanted:
        return f"{rows.shape} numbers are not the {wanted} of the model"
    if not rows.any(axis=1).all():
        return "a vector is zero"
    if kind == "colbert" or (kind == "dense" and model.normalizes):
        # In float64, in which no square of a float32 overflows.
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
        if (np.abs(lengths - 1) > _LENGTH_TOLERANCE).any():
            return "a vector has not unit length"
    return None


def read_only(array: Array) -> Array:
    """A read-only view of the array."""
    view = array.view()
    view.flags.writeable = False
    return view

"""bge-m3's three heads over a packed batch's hidden states.

Source of the maths: the M3-Embedding paper and its reference implementation, FlagEmbedding's
`BGEM3FlagModel`, which the tests compare with number by number.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from app.engine.types import FloatArray, SparseVector, TokenIds
from app.models.batch.packing import PackedBatch


def dense_vectors(
    hidden: Tensor, packed: PackedBatch, pooling: str, places: Tensor | None = None
) -> Tensor:
    """`[S, hidden]` float32 of unit length.

    S are the sequences at the packed `places` `[S]` int64, or all in packed order.
    """
    return functional.normalize(pool(hidden, packed, pooling, places), dim=-1)


def pool(hidden: Tensor, packed: PackedBatch, pooling: str, places: Tensor | None = None) -> Tensor:
    """`[S, hidden]` float32, unnormalised: one state for each of those sequences."""
    borders = packed.cu_seqlens.long()
    if pooling == "cls":
        first = borders[:-1] if places is None else borders[places]
        return hidden[first].float()
    means = torch.segment_reduce(hidden.float(), "mean", lengths=borders.diff())
    return means if places is None else means[places]


def token_weights(states: Tensor, head: nn.Linear) -> Tensor:
    """`[R]` float32: the lexical weight, at least 0, of every token with states `[R, hidden]`."""
    return head(states).squeeze(-1).float().relu()  # type: ignore[no-any-return]


def token_vectors(states: Tensor, head: nn.Linear) -> Tensor:
    """`[R, colbert width]` float32, each of unit length, from states `[R, hidden]`."""
    return functional.normalize(head(states).float(), dim=-1)


@dataclass(frozen=True, slots=True)
class LexicalVocabulary:
    """Which tokens never carry lexical weight: those that frame, fill or stand for the unknown."""

    ignored: TokenIds

    def sparse_vectors(
        self, sequences: list[TokenIds], weights: list[FloatArray]
    ) -> list[SparseVector]:
        """For each sequence its largest weight for each distinct token, where above 0.

        One sort over the whole batch; never an array as long as the vocabulary.
        """
        ids = np.concatenate(sequences)
        values = np.concatenate(weights)
        owner = np.repeat(np.arange(len(sequences)), [len(s) for s in sequences])
        kept = (values > 0) & ~np.isin(ids, self.ignored)
        keys, best = _largest_by_key(owner[kept] << 32 | ids[kept], values[kept])
        borders = np.searchsorted(keys, np.arange(1, len(sequences)) << 32)
        indices = keys & 0xFFFFFFFF
        pairs = zip(np.split(indices, borders), np.split(best, borders), strict=True)
        return [SparseVector(index, value) for index, value in pairs]


def _largest_by_key(
    keys: npt.NDArray[np.int64], values: FloatArray
) -> tuple[npt.NDArray[np.int64], FloatArray]:
    unique, place = np.unique(keys, return_inverse=True)
    best = np.zeros(len(unique), dtype=np.float32)
    np.maximum.at(best, place, values)
    return unique, best

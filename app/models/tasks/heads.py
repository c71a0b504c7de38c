"""Heads over a packed batch's hidden states: bge-m3's three, and the states themselves.

Source of the maths: the M3-Embedding paper and its reference implementation, FlagEmbedding's
`BGEM3FlagModel`, which the tests compare with number by number.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from app.engine.types import FloatArray, SparseVector, TokenIds
from app.models.backbones.backbone import Backbone
from app.models.batch.arrays import Indices, to_device
from app.models.batch.packing import PackedBatch
from app.models.device.transfer import DeviceRows
from app.models.ops.backend import Backend
from app.models.tasks.pooling import mean


def dense_vectors(
    backend: Backend, pooling: str, hidden: Tensor, packed: PackedBatch, sequences: Indices
) -> DeviceRows:
    """`[S, hidden]` float32 of unit length: one for each of the `sequences`, packed indices."""
    if pooling == "cls":
        first = to_device(packed.device, packed.offsets[sequences])
        return DeviceRows(*backend.unit_rows(hidden, torch.float32, first))
    chosen = to_device(packed.device, sequences)
    return DeviceRows(*backend.unit_rows(mean(hidden, packed), torch.float32, chosen))


def token_weights(head: nn.Linear, states: Tensor) -> DeviceRows:
    """`[R]`: the lexical weight of each token with states `[R, hidden]`, if it is above 0."""
    return DeviceRows.of(head(states).squeeze(-1))


def token_vectors(head: nn.Module, backbone: Backbone, states: Tensor) -> DeviceRows:
    """`[R, colbert width]`, each of unit length, from states `[R, hidden]`."""
    return DeviceRows(*backbone.backend.unit_rows(head(states), backbone.wire_dtype))


def token_states(states: Tensor) -> DeviceRows:
    """`[R, hidden]` float32: the states themselves."""
    return DeviceRows.of(states.float())


@dataclass(frozen=True, slots=True)
class LexicalVocabulary:
    """The tokens without lexical weight: special, padding and unknown ones."""

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
    unique, inverse = np.unique(keys, return_inverse=True)
    best = np.zeros(len(unique), dtype=np.float32)
    np.maximum.at(best, inverse, values)
    return unique, best

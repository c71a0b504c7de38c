"""Packed batches and states for tests of attention, and a reference by definition."""

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import torch

from smart_embedder.kernels.attention import QueryKeyValue
from smart_embedder.kernels.packed_batch import PackedBatch, pack

CPU = torch.device("cpu")


def pack_lengths(lengths: list[int], multiple: int = 1, device: torch.device = CPU) -> PackedBatch:
    ids = [np.zeros(length, np.int64) for length in lengths]
    return pack(ids, device=device, multiple=multiple)


def random_states(
    tokens: int, heads: int, width: int, group: int = 1, dtype: torch.dtype = torch.bfloat16
) -> QueryKeyValue:
    """Return views of one projection, as in a layer; `group` heads read the same keys."""
    torch.manual_seed(tokens * heads * width)
    projected = torch.randn(tokens, (group + 2) * heads, width).to(dtype).transpose(0, 1)
    query, key, value = projected.split([group * heads, heads, heads])
    return query, key, value


def by_definition(
    states: Iterable[torch.Tensor],
    offsets: Iterable[int],
    scale: float,
    *,
    causal: bool = False,
    reach: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Compute attention for one sequence after the other.

    `reach` is the number of keys before and after its own that a query attends to; -1 means all.
    """
    query, key, value = states
    group = len(query) // len(key)
    left, right = (math.inf if distance < 0 else distance for distance in reach)
    parts = []
    for start, stop in pairwise(offsets):
        keys, values = (part[:, start:stop].repeat_interleave(group, 0) for part in (key, value))
        positions = torch.arange(stop - start)
        before = positions[:, None] - positions
        seen = (before <= left) & (before >= (0 if causal else -right))
        scores = (query[:, start:stop] @ keys.mT * scale).masked_fill(~seen, -torch.inf)
        parts.append(scores.softmax(-1) @ values)
    return torch.cat(parts, 1).transpose(0, 1)

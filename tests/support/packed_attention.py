"""Packed batches and states for tests of attention, and what is computed of them by definition."""

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
    """Views of one projection, as the layers give them; `group` heads read the same keys."""
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
    """Attention of one sequence after the other, with all its weights at once.

    A query attends to so many keys before and after its own as `reach` says; -1 is all of them.
    """
    query, key, value = states
    group = len(query) // len(key)
    left, right = (math.inf if each < 0 else each for each in reach)
    parts = []
    for start, stop in pairwise(offsets):
        keys, values = (each[:, start:stop].repeat_interleave(group, 0) for each in (key, value))
        place = torch.arange(stop - start)
        before = place[:, None] - place
        seen = (before <= left) & (before >= (0 if causal else -right))
        scores = (query[:, start:stop] @ keys.mT * scale).masked_fill(~seen, -torch.inf)
        parts.append(scores.softmax(-1) @ values)
    return torch.cat(parts, 1).transpose(0, 1)

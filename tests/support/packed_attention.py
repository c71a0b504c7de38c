"""Packed batches and states for tests of attention."""

import numpy as np
import torch

from smart_embedder.models.attention import QueryKeyValue
from smart_embedder.models.batch import PackedBatch, pack

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

"""Attention with tokens that no token attends to: ColBERT's expansion of queries.

A query is filled up with mask tokens, which attend to the query's own tokens alone.
"""

from functools import partial

from torch import Tensor

from app.models.attention.reference import Attention
from app.models.attention.sdpa import attend_padded, fused
from app.models.batch.packing import PackedBatch


def excluding_unattended(attend: Attention) -> Attention:
    """`attend` for the sequences without unattended tokens; the others are padded and masked."""
    return partial(_attend, attend)


def _attend(
    attend: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedBatch,
    *,
    scale: float,
    causal: bool,
) -> Tensor:
    output = attend(query, key, value, packed, scale=scale, causal=causal)
    padding = packed.partly_attended
    if padding is not None:
        masked = partial(fused, causal=False)
        attended = output.new_empty(len(padding.tokens), *output.shape[1:])
        attend_padded(masked, (query, key, value), padding, attended, scale=scale)
        output.index_copy_(0, padding.tokens, attended)
    return output

"""Attention in which some tokens ask and are not asked: ColBERT's expansion of queries.

A query is filled up with mask tokens, which attend to the query's own tokens and to nothing else,
and to which nothing attends.
"""

from torch import Tensor
from torch.nn import functional

from app.models.attention.reference import Attention
from app.models.batch.packing import PackedBatch, PartlyAttended


def leaving_out(attend: Attention) -> Attention:
    """The same where all tokens are attended to; the other sequences of a batch padded."""

    def attend_partly(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedBatch,
        *,
        scale: float,
        causal: bool,
    ) -> Tensor:
        output = attend(query, key, value, packed, scale=scale, causal=causal)
        some = packed.partly_attended
        if some is not None:
            padded = functional.scaled_dot_product_attention(
                _padded(query, some),
                _padded(key, some),
                _padded(value, some),
                attn_mask=some.mask.to(query.dtype),
                scale=scale,
                enable_gqa=query.shape[0] != key.shape[0],
            )
            rows = padded.transpose(1, 2).flatten(0, 1).index_select(0, some.places)
            output.index_copy_(0, some.tokens, rows)
        return output

    return attend_partly


def _padded(states: Tensor, some: PartlyAttended) -> Tensor:
    """`[count, H, length, D]` of `[H, T, D]`."""
    rows = states.transpose(0, 1).index_select(0, some.gather)
    return rows.view(some.count, some.length, *rows.shape[1:]).transpose(1, 2)

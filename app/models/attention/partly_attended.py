"""Attention with tokens that no token attends to: ColBERT's expansion of queries.

A query is filled up with mask tokens, which attend to the query's own tokens alone.
"""

from torch import Tensor
from torch.nn import functional

from app.models.attention.reference import Attention
from app.models.attention.sdpa import pad
from app.models.batch.packing import PackedBatch


def leaving_out(attend: Attention) -> Attention:
    """`attend` for the sequences without unattended tokens; the others are padded and masked."""

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
                pad(query, some),
                pad(key, some),
                pad(value, some),
                attn_mask=some.mask.to(query.dtype),
                scale=scale,
                enable_gqa=query.shape[0] != key.shape[0],
            )
            rows = padded.transpose(1, 2).flatten(0, 1).index_select(0, some.places)
            output.index_copy_(0, some.tokens, rows)
        return output

    return attend_partly

"""transformers' own modules over a packed batch: the reference of the encoder and the decoder.

transformers calls what is registered under a model's `attn_implementation` in every layer and hands
the keyword arguments of the model call through to it: that is how `packed` arrives.
"""

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from smart_embedder.models.attention import eager
from smart_embedder.models.batch import PackedBatch

ATTENTION = "packed_eager"


def register() -> str:
    """Make the packed attention known; return its name for transformers."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    return ATTENTION


def packed_states(model: PreTrainedModel, packed: PackedBatch, **inputs: Any) -> torch.Tensor:
    """`[T, hidden]`: the last hidden state of every token."""
    output = model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, packed=packed, **inputs
    )
    return output.last_hidden_state[0]


def _attention(module, query, key, value, _mask, *, packed, scaling=None, **_):
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(getattr(module, "is_causal", False))
    states = query[0], key[0], value[0]
    return eager(states, packed, scale=scale, causal=causal)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """The attention takes the borders from `packed`."""

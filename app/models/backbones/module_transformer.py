"""A module of transformers over packed batches.

If the attention of its family can be replaced, batches run packed; otherwise they are padded, texts
of similar length together.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from app.models.architectures.transformer import Transformer
from app.models.attention.reference import Attention
from app.models.attention.windowed import PackedAttention
from app.models.batch.arrays import to_device
from app.models.batch.packing import PackedBatch

_PACKED = "smart_embedder_packed"
# Arguments of a family's attention that packed attention does not compute.
_UNSUPPORTED = ("position_bias", "softcap", "s_aux", "cache")
# Padding beside the tokens of a group that is computed together, as a share.
_MOST_PADDING = 0.25


def can_be_packed(module: Any) -> bool:
    """Whether the attention of a module of transformers can be replaced."""
    takes_positions = "position_ids" in inspect.signature(module.forward).parameters
    supported = module._supports_attention_backend  # noqa: SLF001 - it has no public name
    return bool(supported and takes_positions)


def use_packed_attention(module: Any) -> None:
    """Let the module compute its attention by `attend_packed`."""
    AttentionInterface.register(_PACKED, attend_packed)
    module.set_attn_implementation(_PACKED)


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    packed_attention: PackedAttention,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers: from `[1, H, T, D]` to `[1, T, H, D]`.

    Raises `ValueError` for arguments that it does not compute.
    """
    del attention_mask
    unsupported = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if unsupported:
        raise ValueError(f"the attention has {', '.join(unsupported)}")
    attended = packed_attention(
        query[0], key[0], value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=_is_causal(module) if is_causal is None else is_causal,
        window=sliding_window,
    )  # fmt: skip
    return attended[None], None


def _is_causal(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True) and getattr(config, "is_causal", True))


class ModuleTransformer(Transformer):
    """A module of transformers; `attend` computes its attention; if None, batches are padded."""

    shares_prefixes = False
    capturable = False

    def __init__(self, module: nn.Module, attend: Attention | None) -> None:
        self._module = module
        self._attend = attend
        self.rounds_up = attend is not None
        self.window = getattr(module.config, "sliding_window", None)

    def __call__(self, packed: PackedBatch) -> Tensor:
        """Implement `Transformer`."""
        if self._attend is None:
            return torch.cat(list(self._padded(packed)))
        states: Tensor = self._module(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            packed_attention=PackedAttention(self._attend, packed),
        ).last_hidden_state
        return states[0]

    def _padded(self, packed: PackedBatch) -> Iterator[Tensor]:
        """The states of each group of sequences, padded, in packed order."""
        ids = torch.split(packed.input_ids[0], packed.lengths)
        attended = torch.split(packed.attended, packed.lengths)
        padding = float(getattr(self._module.config, "pad_token_id", None) or 0)
        for group in divide_for_padding(packed.lengths):
            input_ids = nn.utils.rnn.pad_sequence(
                list(ids[group]), batch_first=True, padding_value=padding
            )
            is_token = np.arange(input_ids.shape[1]) < np.array(packed.lengths[group])[:, None]
            mask = nn.utils.rnn.pad_sequence(list(attended[group]), batch_first=True).long()
            output = self._module(input_ids=input_ids, attention_mask=mask)
            # A boolean index on the device would make this thread wait for it.
            slots = to_device(packed.device, np.flatnonzero(is_token))
            yield output.last_hidden_state.flatten(0, 1).index_select(0, slots)

    def finish_loading(self) -> None:
        """Implement `Transformer`: no weights are mapped."""

    def with_attention(self, change: Callable[[Attention], Attention]) -> Self:
        """Implement `Transformer`; a padded batch hides unattended tokens by its mask."""
        changed = copy(self)
        if self._attend is not None:
            changed._attend = change(self._attend)  # noqa: SLF001 - its own
        return changed

    def with_fewer_layers(self) -> tuple[Self, float]:
        """Implement `Transformer`: families differ, so all layers are measured."""
        return self, 1.0


def divide_for_padding(lengths: list[int]) -> Iterator[slice]:
    """Groups of neighbours, of ascending lengths, that need little padding."""
    start = tokens = 0
    for index, length in enumerate(lengths):
        padded = (index + 1 - start) * length
        if index > start and padded > (1 + _MOST_PADDING) * (tokens + length):
            yield slice(start, index)
            start, tokens = index, 0
        tokens += length
    yield slice(start, len(lengths))

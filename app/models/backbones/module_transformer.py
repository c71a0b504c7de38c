"""A module of transformers over packed batches.

If the attention of its family can be replaced, batches run packed; otherwise they are padded, texts
of similar length together. Where padding changes results, texts of one length are computed
together, and where texts beside it do, each text by itself.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from app.errors import OutOfMemoryError
from app.models.architectures.transformer import Transformer
from app.models.attention.reference import Attention
from app.models.attention.windowed import PackedAttention
from app.models.batch.arrays import to_device
from app.models.batch.packing import PackedBatch
from app.models.device.memory import memory_usage

# How the texts of a batch are laid out, the fastest first.
PACKED, PADDED, ONE_LENGTH, ALONE = "packed", "padded", "one_length", "alone"
_PACKED = "smart_embedder_packed"
# Arguments of a family's attention that packed attention does not compute.
_UNSUPPORTED = ("position_bias", "softcap", "s_aux", "cache")
# Padding beside the tokens of a group that is computed together, as a share.
_MOST_PADDING = {PADDED: 0.25, ONE_LENGTH: 0.0, ALONE: 0.0}
# What attention may take for a group of several texts, and for one on a CPU without asking how much
# memory is free; then one may take this share of it, because others take memory, too.
_GROUP_BYTES = 2**28
_FREE_SHARE = 0.5
_RETRY_AFTER = 30


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
    """A module of transformers, whose batches have a `layout`; `attend` is for the packed one.

    `padding` is the token that fills rows up, by default the model's own. `bytes_of_pair` is what
    attention takes for each pair of tokens of one text, where it is quadratic.
    """

    shares_prefixes = False
    capturable = False

    def __init__(
        self,
        module: nn.Module,
        layout: str,
        attend: Attention | None = None,
        *,
        padding: int | None = None,
        bytes_of_pair: float = 0.0,
    ) -> None:
        self._module = module
        self._layout = layout
        self._attend = attend
        own: int | None = getattr(module.config, "pad_token_id", None)
        self._padding = (own or 0) if padding is None else padding
        self._bytes_of_pair = bytes_of_pair
        self.rounds_up = layout == PACKED
        self.window = getattr(module.config, "sliding_window", None)

    def __call__(self, packed: PackedBatch) -> Tensor:
        """Implement `Transformer`.

        Raises `OutOfMemoryError` for a text whose attention the free memory of a CPU does not hold.
        """
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
        self._require_memory(packed)
        ids = torch.split(packed.input_ids[0], packed.lengths)
        attended = torch.split(packed.attended, packed.lengths)
        for group in divide_for_padding(
            packed.lengths, _MOST_PADDING[self._layout], self._most_pairs
        ):
            input_ids = nn.utils.rnn.pad_sequence(
                list(ids[group]), batch_first=True, padding_value=float(self._padding)
            )
            is_token = np.arange(input_ids.shape[1]) < np.array(packed.lengths[group])[:, None]
            mask = nn.utils.rnn.pad_sequence(list(attended[group]), batch_first=True).long()
            output = self._module(input_ids=input_ids, attention_mask=mask)
            # A boolean index on the device would make this thread wait for it.
            slots = to_device(packed.device, np.flatnonzero(is_token))
            yield output.last_hidden_state.flatten(0, 1).index_select(0, slots)

    @property
    def _most_pairs(self) -> float:
        """Pairs of tokens, each of one text, in a group of several."""
        if self._layout == ALONE:
            return 0.0
        return _GROUP_BYTES / self._bytes_of_pair if self._bytes_of_pair else math.inf

    def _require_memory(self, packed: PackedBatch) -> None:
        """Refuse a text that would take too much of a CPU's memory: the system kills who does.

        A GPU's allocator raises an error.
        """
        needed = packed.max_length**2 * self._bytes_of_pair
        if packed.device.type != "cpu" or needed <= _GROUP_BYTES:
            return
        usage = memory_usage(packed.device)
        most = _FREE_SHARE * (usage.total - usage.used)
        if needed > most:
            raise OutOfMemoryError(
                f"attention over a text of {packed.max_length} tokens takes {needed / 2**30:.1f} "
                f"GiB in this model, and {max(0.0, most) / 2**30:.1f} GiB can be had; send shorter "
                "texts, or lower max_tokens or EMBED_MAX_LENGTH",
                retry_after=_RETRY_AFTER,
            )

    def with_attention(self, change: Callable[[Attention], Attention]) -> Self:
        """Implement `Transformer`; a padded batch hides unattended tokens by its mask."""
        changed = copy(self)
        if self._attend is not None:
            changed._attend = change(self._attend)  # noqa: SLF001 - its own
        return changed

    def with_fewer_layers(self) -> tuple[Self, float]:
        """Implement `Transformer`: families differ, so all layers are measured."""
        return self, 1.0


def divide_for_padding(
    lengths: list[int], most_padding: float, most_pairs: float
) -> Iterator[slice]:
    """Groups of neighbours, of ascending lengths, that need little padding.

    Padding is at most the share `most_padding` of a group's tokens, and a group of several has at
    most `most_pairs` pairs of tokens, each of one text with its padding.
    """
    start = tokens = 0
    for index, length in enumerate(lengths):
        padded = (index + 1 - start) * length
        too_many = padded > (1 + most_padding) * (tokens + length) or padded * length > most_pairs
        if index > start and too_many:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += length
    yield slice(start, len(lengths))

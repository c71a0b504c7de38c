"""How a module of transformers computes the texts of a batch: packed, or in groups with padding.

A module that is not packed computes groups of texts of near lengths with padding, of one length, or
each text alone.
"""

import math
import weakref
from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from smart_embedder.errors import OutOfMemoryError
from smart_embedder.hardware.device import memory_usage
from smart_embedder.kernels.attention import (
    Attention,
    PackedAttention,
    exclude_unattended,
    has_window,
)
from smart_embedder.kernels.packed_batch import PackedBatch, group_for_padding, to_device
from smart_embedder.models.families.backbone import Transformer
from smart_embedder.tokens import TokenIds

# The layouts of the texts of a batch, the fastest first.
PACKED, PADDED, ONE_LENGTH, ALONE = "packed", "padded", "one_length", "alone"
# The most padding of a group that is computed together, as a share of its tokens.
_MAX_PADDING = {PADDED: 0.25, ONE_LENGTH: 0.0, ALONE: 0.0}
# Added to the positions of the second text of a pair, by which a classifier's tokens are marked.
SECOND_SEGMENT_OFFSET = 2**32
# The most memory of attention for a group of several texts, and for a single text on a CPU before
# the free memory is checked. Then a text may take this share of it, as others need memory, too.
_GROUP_BYTES = 2**28
_FREE_SHARE = 0.5
_RETRY_AFTER = 30
# Attention's memory is measured with texts of this many tokens, twice and three times as many.
_MEASURED_TOKENS = 16
_MEASURED_ID = 7


class PackedModule(Transformer):
    """A module that computes packed texts, with `attend` in place of its own attention."""

    def __init__(self, module: nn.Module, attend: Attention) -> None:
        self._module = module
        self._attend = attend
        self.window = getattr(module.config, "sliding_window", None)
        # If the kernel has no window, the texts are divided by their lengths, and a captured graph
        # would use those of its own batch for all others.
        self.capturable = self.window is None or has_window(attend)

    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """Implement `Transformer`."""
        states: Tensor = self._module(**self.inputs(packed)).last_hidden_state[0]
        return states if rows is None else states.index_select(0, rows)

    def inputs(self, packed: PackedBatch) -> dict[str, Any]:
        """Return the inputs of the module, which a model around it passes on."""
        attention = PackedAttention(self._attend, packed)
        ids, positions = packed.input_ids, packed.position_ids
        return {"input_ids": ids, "position_ids": positions, "packed_attention": attention}

    def without_unattended(self) -> Self:
        """Implement `Transformer`."""
        changed = copy(self)
        changed._attend = exclude_unattended(self._attend)  # noqa: SLF001 - a copy
        return changed


class PaddedModule(Transformer):
    """A module that computes groups of texts, in one of the layouts with padding or without.

    `padding` is the id of the padding token, by default the model's. `bytes_per_pair` is the memory
    of attention for each pair of tokens of a text, if it is quadratic.
    """

    capturable = rounds_up = False

    def __init__(self, module: Any, layout: str, padding: int | None = None) -> None:
        self._module = module
        self._layout = layout
        default: int | None = getattr(module.config, "pad_token_id", None)
        self._padding = (default or 0) if padding is None else padding
        self.bytes_per_pair = 0.0

    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """Implement `Transformer`.

        Raises `OutOfMemoryError` for a text whose attention does not fit the free memory of a CPU.
        """
        self._require_memory(packed)
        states = torch.cat(list(self._compute_groups(packed)))
        return states if rows is None else states.index_select(0, rows)

    def without_unattended(self) -> Self:
        """Implement `Transformer`; the mask of a group hides unattended tokens."""
        return self

    def inputs(self, packed: PackedBatch) -> dict[str, Any]:
        """Return the inputs of the module for a single text."""
        return {"input_ids": packed.input_ids}

    def _compute_groups(self, packed: PackedBatch) -> Iterator[Tensor]:
        """Yield the states of each group of sequences, computed with padding, in packed order."""
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        ids = torch.split(packed.input_ids[0], packed.lengths)
        attended = torch.split(packed.attended, packed.lengths)
        max_pairs = _GROUP_BYTES / self.bytes_per_pair if self.bytes_per_pair else math.inf
        if self._layout == ALONE:
            max_pairs = 0.0
        for group in group_for_padding(packed.lengths, _MAX_PADDING[self._layout], max_pairs):
            input_ids = pad(list(ids[group]), padding_value=float(self._padding))
            is_token = np.arange(input_ids.shape[1]) < np.array(packed.lengths[group])[:, None]
            mask = pad(list(attended[group])).long()
            options = {"attention_mask": mask}
            if getattr(self._module, "marks_segments", False):
                is_second = torch.split(
                    packed.position_ids[0] >= SECOND_SEGMENT_OFFSET, packed.lengths
                )
                options["token_type_ids"] = pad(list(is_second[group])).long()
            output = self._module(input_ids=input_ids, **options)
            # A boolean index on the device would make this thread wait for the device.
            slots = to_device(packed.device, np.flatnonzero(is_token))
            yield output.last_hidden_state.flatten(0, 1).index_select(0, slots)

    @torch.inference_mode()
    def measure_attention(self, positions: int, device: torch.device, ending: TokenIds) -> None:
        """Measure the memory of attention by texts that end in `ending`.

        After each operation the memory in use is a quadratic polynomial of the number of tokens.
        Texts of three lengths determine the factor of its square, which is 0 if no memory is
        quadratic.
        """
        step = max(1, min(_MEASURED_TOKENS, positions // 3))
        counts: list[list[int]] = []
        for length in (step, 2 * step, 3 * step):
            with _LiveBytes() as live:
                ids = torch.full((1, length), _MEASURED_ID, device=device)
                ids[0, length - min(length, len(ending)) :] = to_device(device, ending[-length:])
                self._module(input_ids=ids, attention_mask=torch.ones_like(ids))
            counts.append(live.after)
        if len({len(count) for count in counts}) > 1:  # Longer texts take other operations.
            counts = [[max(count)] for count in counts]
        squares = [
            (third - 2 * second + first) / 2 for first, second, third in zip(*counts, strict=True)
        ]
        self.bytes_per_pair = float(max(0.0, *squares) / step**2)

    def _require_memory(self, packed: PackedBatch) -> None:
        """Refuse a text whose attention does not fit a CPU's memory: the system would kill us."""
        needed = packed.max_length**2 * self.bytes_per_pair
        if packed.device.type != "cpu" or needed <= _GROUP_BYTES:
            return
        usage = memory_usage(packed.device)
        available = _FREE_SHARE * (usage.total - usage.used)
        if needed > available:
            raise OutOfMemoryError(
                f"attention over a text of {packed.max_length} tokens takes {needed / 2**30:.1f} "
                f"GiB in this model, and {max(0.0, available) / 2**30:.1f} GiB are available; send "
                "shorter texts, or lower max_tokens or EMBED_MAX_LENGTH",
                retry_after=_RETRY_AFTER,
            )


class _LiveBytes(TorchFunctionMode):
    """Records, after each operation, the bytes of the results that are still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[int] = []
        self._sizes: dict[int, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Implement `TorchFunctionMode`."""
        del types
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # Tensors within `vmap`, which makes masks, are parts of its result, which counts once.
            if isinstance(leaf, Tensor) and not is_batchedtensor(leaf):
                storage = leaf.untyped_storage()
                if id(storage) not in self._sizes:
                    weakref.finalize(storage, self._sizes.pop, id(storage))
                self._sizes[id(storage)] = storage.nbytes()
        self.after.append(sum(self._sizes.values()))
        return result

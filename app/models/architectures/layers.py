"""What encoders and decoders have in common."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

_ROWS_OF_A_THREAD = 256
# A shallow transformer has one of so many layers.
_SHALLOW = 12

Layer = TypeVar("Layer")


def few_of(layers: Sequence[Layer]) -> Sequence[Layer]:
    """The first of them, enough to measure what all would cost."""
    return layers[: max(2, len(layers) // _SHALLOW)]


def in_blocks(step: Callable[..., Tensor], states: Tensor, *others: Tensor) -> Tensor:
    """`step`, which looks at each row by itself, on a CPU a few rows at a time.

    What it holds between two products would else be too large for the cache, and at 32 MiB too
    large for what the allocator keeps: pages that are new cost more than a pass over them.
    """
    at_once = _ROWS_OF_A_THREAD * torch.get_num_threads()
    if states.device.type != "cpu" or len(states) <= at_once:
        return step(states, *others)
    parts = (torch.split(each, at_once) for each in (states, *others))
    return torch.cat([step(*part) for part in zip(*parts, strict=True)])

"""The passes over rows between two products in 8 bits: rounding, and a norm of what comes out.

`PyTorchRows` says what is computed and runs everywhere. Where the kernels in C are built they do
the same, each pass over the memory once. No row depends on the others of its batch.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from app.models.ops.norm import Norm

# A row is stored behind its levels as two float32 numbers: scale and minimum.
_ROW_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class RoundedLevels:
    """`levels` `[T, width]` u8 and `far` `[T]` bool: whether a row reaches beyond the levels."""

    levels: Tensor
    far: Tensor


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """`levels` `[T, width]` u8, of which each stands for `scale` x level + `minimum`, `[T, 1]`."""

    levels: Tensor
    scale: Tensor
    minimum: Tensor


@dataclass(frozen=True, slots=True)
class Ending:
    """What makes a product of levels states again, channel by channel, `[out]` float32.

    `sums` are those of the weights, `unit` is that of the residual's levels, `constant` is added;
    then comes `norm`.
    """

    sums: Tensor
    unit: Tensor
    constant: Tensor
    norm: Norm


def can_quantize(width: int) -> bool:
    """Whether an input of that width can be quantized row by row."""
    return width % _ROW_ALIGNMENT == 0


class Rows(Protocol):
    """One way to compute them."""

    def round_levels(self, states: Tensor, lowest: float, highest: float) -> RoundedLevels:
        """Cut levels `[T, width]` float32 down to whole ones between `lowest` and `highest`."""

    def round_rows(self, states: Tensor) -> RoundedRows:
        """Round each row of `[T, width]`, float32 or bfloat16, to 255 levels of its own range."""

    def norm_product(
        self, product: Tensor, rows: RoundedRows, residual: Tensor, ending: Ending
    ) -> Tensor:
        """The norm of product and residual `[T, out]` float32; `product` may be overwritten."""


class PyTorchRows:
    """By PyTorch's operators: the reference of `app.models.ops`."""

    def round_levels(self, states: Tensor, lowest: float, highest: float) -> RoundedLevels:
        """Implement `Rows`."""
        within = states.clamp(lowest, highest)
        return RoundedLevels(within.to(torch.uint8), (within != states).any(1))

    def round_rows(self, states: Tensor) -> RoundedRows:
        """Implement `Rows`."""
        rounded = torch.ops.quantized.embedding_bag_byte_prepack(states.float())
        width = states.shape[1]
        ranges = rounded.view(torch.float32)[:, width // _ROW_ALIGNMENT :]
        scale, minimum = ranges.split(1, dim=1)
        return RoundedRows(rounded[:, :width], scale, minimum)

    def norm_product(
        self, product: Tensor, rows: RoundedRows, residual: Tensor, ending: Ending
    ) -> Tensor:
        """Implement `Rows`."""
        # In place: memory that is touched for the first time costs more than a pass over it.
        product.mul_(rows.scale).addcmul_(rows.minimum, ending.sums)
        return ending.norm(product.addcmul_(residual, ending.unit).add_(ending.constant))

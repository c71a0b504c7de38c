"""The passes over rows between two products of a decoder.

`PyTorchRows` says what is computed and runs everywhere. Where the kernels in C are built they do
the same in bfloat16, each pass over the memory once. No row depends on the others of its batch.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Normalisation by the root of the mean square; a weight may be `[heads, width]`."""

    weight: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        """Of the last dimension, in the dtype of `states`."""
        return functional.rms_norm(states, self.weight.shape[-1:], None, self.epsilon) * self.weight


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary positions (Su et al. 2021): cosines and sines `[T, width / 2]`, float32.

    There is an angle for each token and pair of numbers.
    """

    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, positions: Tensor, width: int, theta: float) -> "Rotation":
        """Of tokens at `positions` `[T]`, for heads of `width` numbers.

        The waves get longer from pair to pair, from 2 pi up to nearly 2 pi `theta` tokens.
        """
        pair = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
        angles = positions[:, None].float() * (1.0 / theta ** (pair / width))
        return cls(angles.cos(), angles.sin())

    def __call__(self, states: Tensor) -> Tensor:
        """Turn `[T, H, width]`; a pair has one number in each half, as in transformers."""
        cosines, sines = self.cosines[:, None], self.sines[:, None]
        first, second = states.float().chunk(2, dim=-1)
        turned = first * cosines - second * sines, second * cosines + first * sines
        return torch.cat(turned, dim=-1).to(states.dtype)


class DecoderRows(Protocol):
    """One way to compute them."""

    def norm(self, states: Tensor, norm: RmsNorm) -> Tensor:
        """Normalise `[T, width]`."""

    def turn(self, states: Tensor, norm: RmsNorm, rotation: Rotation) -> None:
        """Normalise and turn, in place, as many heads of `[T, H, width]` as `norm` has weights."""

    def gate(self, states: Tensor) -> Tensor:
        """`silu(x) y` of the halves x and y of `[T, 2 width]`: `[T, width]`."""


class PyTorchRows:
    """By PyTorch's operators: the reference of `app.models.ops`."""

    def norm(self, states: Tensor, norm: RmsNorm) -> Tensor:
        """Implement `DecoderRows`."""
        return norm(states)

    def turn(self, states: Tensor, norm: RmsNorm, rotation: Rotation) -> None:
        """Implement `DecoderRows`."""
        turned = states[:, : len(norm.weight)]
        turned.copy_(rotation(norm(turned)))

    def gate(self, states: Tensor) -> Tensor:
        """Implement `DecoderRows`."""
        gate, through = states.chunk(2, dim=-1)
        return functional.silu(gate).mul_(through)

"""The arguments and results of a backend's operations, besides plain tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# `[T, in]` to `[T, out]`.
Linear = Callable[[Tensor], Tensor]
# The same and a residual `[T, out]`, which may be overwritten, to their sum.
AddLinear = Callable[[Tensor, Tensor], Tensor]
# oneDNN's names for the activations of transformers: (operation, algorithm).
ACTIVATIONS = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}


def activate(states: Tensor, activation: str | None) -> Tensor:
    """One of `ACTIVATIONS`; `states` may be overwritten."""
    operation, algorithm = ACTIVATIONS[activation]
    match operation:
        case "gelu":
            return functional.gelu(states, approximate=algorithm)
        case "relu":
            return states.relu_()
    return states


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation over the last dimension; on a CPU its parameters are always float32."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        """In the dtype of `states`."""
        return functional.layer_norm(
            states, self.weight.shape, self.weight, self.bias, self.epsilon
        )


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Normalisation by the root of the mean square; a weight may be `[heads, width]`."""

    weight: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        """Of the last dimension, in the dtype of `states`."""
        return functional.rms_norm(states, self.weight.shape[-1:], None, self.epsilon) * self.weight


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Rotary position embedding (Su et al. 2021): cosines and sines `[T, width / 2]`, float32."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def at(cls, positions: Tensor, width: int, theta: float) -> "RotaryEmbedding":
        """Of tokens at `positions` `[T]`, for heads of `width` numbers."""
        pair = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
        angles = positions[:, None].float() * (1.0 / theta ** (pair / width))
        return cls(angles.cos(), angles.sin())


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of bytes that a row of `width` channels becomes.

    Each channel is multiplied by one of `factors` `[width]`. The channels `repeated` `[repeats]`
    int32 have further columns behind the others. `offsets` `[width + repeats]` are what truncation
    begins with: those of a channel's k columns are k-ths apart, so that their sum is what k times
    the channel is rounded to.
    """

    factors: Tensor
    repeated: Tensor
    offsets: Tensor

    def spread(self, steps: Tensor) -> Tensor:
        """From `[T, width]` in steps to `[T, width + repeats]`, whole numbers."""
        return torch.cat([steps, steps[:, self.repeated]], 1).add_(self.offsets).floor_()


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """`values` `[T, columns]` u8; each stands for `scale` x value + `minimum`, both `[T, 1]`."""

    values: Tensor
    scale: Tensor
    minimum: Tensor


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """`values` `[out, columns]` s8; each stands for `scale` x value, and all else is `[out]`.

    `sums` are those of the scaled values. `bias` is added to the product.
    """

    values: Tensor
    scale: Tensor
    sums: Tensor
    bias: Tensor


# The product of rows with weights: `[T, out]`.
Int8Gemm = Callable[[QuantizedRows], Tensor]

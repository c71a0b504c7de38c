"""Layer normalisation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from app.models.ops.native_library import Library, load_library, place

# `[T, width]` twice: the norm of their sum, perhaps written over the first.
SumNorm = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer normalisation over the last dimension; on a CPU its parameters are always float32."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        """In the dtype of `states`."""
        return functional.layer_norm(
            states, self.weight.shape, self.weight, self.bias, self.epsilon
        )

    def of_sum(self, states: Tensor, residual: Tensor) -> Tensor:
        """Normalise the sum, which is written over `states`."""
        return self(states.add_(residual))


def make_sum_norm(norm: Norm, dtype: torch.dtype) -> SumNorm:
    """The fastest way to compute `norm.of_sum` in `dtype`."""
    if norm.weight.device.type != "cpu" or dtype is not torch.bfloat16:
        return norm.of_sum
    library = load_library()
    return norm.of_sum if library is None else _native(norm, library)


def _native(norm: Norm, library: Library) -> SumNorm:
    parameters = norm.weight.data_ptr(), norm.bias.data_ptr()

    def of_sum(states: Tensor, residual: Tensor) -> Tensor:
        places = (place(each, torch.bfloat16) for each in (states, residual))
        library.run("norm_sum", *places, *parameters, norm.epsilon, *states.shape)
        return states

    return of_sum

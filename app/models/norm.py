"""Layer normalisation."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


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

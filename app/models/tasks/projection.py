"""The layers between a transformer's states, or a pooled vector, and the vectors of a model.

They are sentence-transformers' modules Dense and Normalize, which the tests compare with.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.errors import StartupError
from app.models.checkpoint.modules import read_modules
from app.models.checkpoint.sentence_config import Normalization, Projection, Step, Truncation
from app.models.checkpoint.weights import Weights

# Stanford's ColBERT has one layer, among the weights of the transformer.
_STANFORD = "linear"


class DenseLayer(nn.Module):
    """sentence-transformers' Dense: a linear layer, an activation, and a residual connection."""

    def __init__(
        self, linear: nn.Linear, activation: nn.Module, residual: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self._linear = linear
        self._activation = activation
        self._residual = residual

    @classmethod
    def load(cls, projection: Projection) -> "DenseLayer":
        """Read the weights; raises `StartupError` where they cannot be read."""
        weights = Weights.read(projection.folder)
        shape = projection.in_features, projection.out_features
        residual: nn.Module | None = None
        if projection.residual:
            same = shape[0] == shape[1]
            residual = nn.Identity() if same else weights.linear("residual", *shape, bias=False)
        linear = weights.linear("linear", *shape, bias=projection.bias)
        return cls(linear, _activation(projection), residual)

    def forward(self, states: Tensor) -> Tensor:
        """`[rows, out]` of states `[rows, in]`."""
        projected: Tensor = self._activation(self._linear(states))
        return projected if self._residual is None else projected + self._residual(states)


def _activation(projection: Projection) -> nn.Module:
    """A module of PyTorch; no other code that a configuration names is run."""
    package, _, name = projection.activation.rpartition(".")
    found = getattr(torch.nn, name, None)
    if package.split(".")[0] != "torch" or not isinstance(found, type):
        raise StartupError(
            f"{projection.folder} has the activation {projection.activation}, which is none of "
            "PyTorch's"
        )
    return found()  # type: ignore[no-any-return]


def load_steps(
    steps: Sequence[Step], width: int, device: torch.device
) -> tuple[list[Callable[[Tensor], Tensor]], int]:
    """The steps from a pooled vector of `width` numbers to the dense vector, and its width.

    They compute in float32. Raises `StartupError` where a projection does not fit.
    """
    loaded: list[Callable[[Tensor], Tensor]] = []
    for step in steps:
        if isinstance(step, Normalization):
            loaded.append(_normalize)
            continue
        if isinstance(step, Truncation):
            loaded.append(partial(_truncate, step.width))
            width = min(width, step.width)
            continue
        if step.in_features != width:
            raise StartupError(
                f"the projection in {step.folder} takes {step.in_features} numbers, and there are "
                f"{width}"
            )
        loaded.append(DenseLayer.load(step).to(device, torch.float32))
        width = step.out_features
    return loaded, width


def _normalize(vectors: Tensor) -> Tensor:
    return functional.normalize(vectors, dim=-1)


def _truncate(width: int, vectors: Tensor) -> Tensor:
    return vectors[:, :width]


def load_token_projection(folder: Path, weights: Weights, width: int) -> nn.Sequential:
    """The layers from a token's state of `width` numbers to its ColBERT vector.

    Raises `StartupError` where they cannot be read.
    """
    modules = [module for module in read_modules(folder) if module.kind == "Dense"]
    if not modules and f"{_STANFORD}.weight" in weights:
        out_features = weights.tensors[f"{_STANFORD}.weight"].shape[0]
        linear = weights.linear(_STANFORD, width, out_features, bias=False)
        return nn.Sequential(DenseLayer(linear, nn.Identity()))
    if not modules:
        raise StartupError(f"{folder} has no projection of its tokens' states")
    layers: list[DenseLayer] = []
    for module in modules:
        projection = Projection.read(module.folder)
        if projection.in_features != width:
            raise StartupError(
                f"{module.folder} projects {projection.in_features} numbers, and is given {width}"
            )
        layers.append(DenseLayer.load(projection))
        width = projection.out_features
    return nn.Sequential(*layers)

"""The layers between a token's state and its ColBERT vector."""

from pathlib import Path

import torch
from torch import Tensor, nn

from app.errors import StartupError
from app.models.checkpoint.config import read_config, whole_number
from app.models.checkpoint.modules import read_modules
from app.models.checkpoint.weights import Weights

_STANFORD = "linear"


class DenseLayer(nn.Module):
    """sentence-transformers' Dense: a linear layer, its activation, and its input beside it."""

    def __init__(
        self, linear: nn.Linear, activation: nn.Module, residual: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self._linear = linear
        self._activation = activation
        self._residual = residual

    def forward(self, states: Tensor) -> Tensor:
        """`[rows, out]` of states `[rows, in]`."""
        projected: Tensor = self._activation(self._linear(states))
        return projected if self._residual is None else projected + self._residual(states)


def load_projection(folder: Path, weights: Weights, width: int) -> nn.Sequential:
    """The projection of states of that `width`; raises `StartupError` where it cannot be read."""
    modules = [module for module in read_modules(folder) if module.kind == "Dense"]
    if not modules and f"{_STANFORD}.weight" in weights:
        out_features = weights.tensors[f"{_STANFORD}.weight"].shape[0]
        return nn.Sequential(
            DenseLayer(weights.linear(_STANFORD, width, out_features, bias=False), nn.Identity())
        )
    if not modules:
        raise StartupError(f"{folder} has no projection of its tokens' states")
    layers: list[DenseLayer] = []
    for module in modules:
        layers.append(_load_dense(module.folder, width))
        width = layers[-1].out_features
    return nn.Sequential(*layers)


def _load_dense(folder: Path, width: int) -> DenseLayer:
    config, weights = read_config(folder), Weights.read(folder)
    inner, outer = (whole_number(folder, config, f"{side}_features") for side in ("in", "out"))
    if inner != width:
        raise StartupError(f"{folder} projects {inner} numbers, and is given {width}")
    residual: nn.Module | None = None
    if config.get("use_residual"):
        residual = (
            nn.Identity()
            if inner == outer
            else weights.linear("residual", inner, outer, bias=False)
        )
    return DenseLayer(
        weights.linear("linear", inner, outer, bias=bool(config.get("bias", True))),
        _activation(folder, str(config.get("activation_function", "torch.nn.Tanh"))),
        residual,
    )


def _activation(folder: Path, name: str) -> nn.Module:
    """One of PyTorch's modules, which alone are run."""
    package, _, cls = name.rpartition(".")
    found = getattr(torch.nn, cls, None)
    if package.split(".")[0] != "torch" or not isinstance(found, type):
        raise StartupError(f"{folder} has the activation {name}, which is none of PyTorch's")
    return found()  # type: ignore[no-any-return]

"""From hidden states to vectors: pooling of a text's tokens, projections, and scaling.

Each is one of sentence-transformers, which the tests compare with. Vectors of whole texts are made
in float32. Which of them a model has is read in `smart_embedder.models.checkpoint.config`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from smart_embedder.errors import StartupError
from smart_embedder.models.batch import Indices, PackedBatch, to_device
from smart_embedder.models.checkpoint.config import (
    Normalization,
    Projection,
    Step,
    Truncation,
    read_modules,
)
from smart_embedder.models.checkpoint.weights import Weights


def pool(
    hidden: Tensor, packed: PackedBatch, poolings: Sequence[str], sequences: Indices
) -> Tensor:
    """`[S, poolings x hidden]` float32 of the `sequences`, packed indices, from `[T, hidden]`.

    The vectors of several poolings are concatenated.
    """
    chosen = to_device(packed.device, sequences)
    pooled = [_POOLINGS[name](hidden, packed).index_select(0, chosen) for name in poolings]
    return torch.cat(pooled, dim=-1)


def first(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """`[N, hidden]`: the state of each sequence's first token, in packed order."""
    return hidden[packed.cu_seqlens[:-1].long()].float()


def last(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """`[N, hidden]`: the state of each sequence's last token, in packed order."""
    return hidden[packed.cu_seqlens[1:].long() - 1].float()


def mean(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """`[N, hidden]`: the mean of each sequence's states, in packed order."""
    return _reduced(hidden, packed, "mean")


def _mean_sqrt_length(hidden: Tensor, packed: PackedBatch) -> Tensor:
    return _reduced(hidden, packed, "sum") / _lengths(packed).sqrt()[:, None]


def _weighted_mean(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """The mean with weight 1 for the first token, 2 for the second, and so on."""
    offsets = packed.offsets
    ranks = np.arange(1, packed.tokens + 1) - np.repeat(offsets[:-1], np.diff(offsets))
    weights = to_device(packed.device, ranks.astype(np.float32))[:, None]
    lengths = _lengths(packed).float()
    total = lengths * (lengths + 1) / 2
    return _reduced(hidden.float() * weights, packed, "sum") / total[:, None]


def _reduced(states: Tensor, packed: PackedBatch, how: str) -> Tensor:
    if states.device.type == "mps":  # PyTorch has no `segment_reduce` there.
        return one_by_one(states, packed, how)
    # `unsafe` leaves out checks of the lengths, for which PyTorch would wait for the device.
    return torch.segment_reduce(states.float(), how, lengths=_lengths(packed), unsafe=True)


def one_by_one(states: Tensor, packed: PackedBatch, how: str) -> Tensor:
    """`[N, hidden]`: the mean, max or sum of each sequence's states, by an operator for each."""
    reduce: Callable[..., Tensor] = getattr(torch, {"max": "amax"}.get(how, how))
    return torch.stack([reduce(part, 0) for part in torch.split(states.float(), packed.lengths)])


def _lengths(packed: PackedBatch) -> Tensor:
    return packed.cu_seqlens.long().diff()


_POOLINGS: dict[str, Callable[[Tensor, PackedBatch], Tensor]] = {
    "cls": first,
    "last_token": last,
    "max": partial(_reduced, how="max"),
    "mean": mean,
    "mean_sqrt_length": _mean_sqrt_length,
    "weighted_mean": _weighted_mean,
}


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
        """Read the weights; raises `StartupError` where they cannot be read.

        The activation is a module of PyTorch; no other code that a configuration names is run.
        """
        weights = Weights.read(projection.folder)
        shape = projection.in_features, projection.out_features
        residual: nn.Module | None = None
        if projection.residual:
            same = shape[0] == shape[1]
            residual = nn.Identity() if same else weights.linear("residual", *shape, bias=False)
        linear = weights.linear("linear", *shape, bias=projection.bias)
        package, _, name = projection.activation.rpartition(".")
        activation = getattr(torch.nn, name, None)
        if package.split(".")[0] != "torch" or not isinstance(activation, type):
            raise StartupError(
                f"{projection.folder} has the activation {projection.activation}, which is none of "
                "PyTorch's"
            )
        return cls(linear, activation(), residual)

    def forward(self, states: Tensor) -> Tensor:
        """`[rows, out]` of states `[rows, in]`."""
        projected: Tensor = self._activation(self._linear(states))
        return projected if self._residual is None else projected + self._residual(states)


def load_steps(
    steps: Sequence[Step], width: int, device: torch.device
) -> tuple[list[Callable[[Tensor], Tensor]], int]:
    """The steps from a pooled vector of `width` numbers to the dense vector, and its width.

    They compute in float32. Raises `StartupError` where a projection does not fit.
    """
    loaded: list[Callable[[Tensor], Tensor]] = []
    for step in steps:
        if isinstance(step, Normalization):
            loaded.append(partial(functional.normalize, dim=-1))
        elif isinstance(step, Truncation):
            width = min(width, step.width)
            loaded.append(partial(torch.narrow, dim=1, start=0, length=width))
        elif step.in_features != width:
            raise StartupError(
                f"the projection in {step.folder} takes {step.in_features} numbers, and there are "
                f"{width}"
            )
        else:
            loaded.append(DenseLayer.load(step).to(device, torch.float32))
            width = step.out_features
    return loaded, width


def load_token_projection(folder: Path, weights: Weights, width: int) -> nn.Sequential:
    """The layers from a token's state of `width` numbers to its ColBERT vector.

    Raises `StartupError` where they cannot be read.
    """
    modules = [module for module in read_modules(folder) if module.kind == "Dense"]
    if not modules and "linear.weight" in weights:
        # Stanford's ColBERT has one layer, among the weights of the transformer.
        out_features = weights.tensors["linear.weight"].shape[0]
        linear = weights.linear("linear", width, out_features, bias=False)
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

"""From the states of a text's tokens to its one vector: pooling, projections, unit length.

They are those of sentence-transformers, which the tests compare with, in float32.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from app.errors import StartupError
from app.models.batch.packing import PackedBatch, to_device
from app.models.batch.selection import Places
from app.models.checkpoint.sentence_config import Normalization, Projection, Step
from app.models.checkpoint.weights import Weights

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda states: states,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
}


def pool(hidden: Tensor, packed: PackedBatch, poolings: Sequence[str], places: Places) -> Tensor:
    """`[S, poolings x hidden]` float32: of the sequences at the packed places, from `[T, hidden]`.

    Each pooling is one of `POOLINGS`; several stand side by side.
    """
    chosen = to_device(packed.device, places)
    made = [_POOLINGS[name](hidden, packed).index_select(0, chosen) for name in poolings]
    return torch.cat(made, dim=-1)


def _first(hidden: Tensor, packed: PackedBatch) -> Tensor:
    return hidden[packed.cu_seqlens[:-1].long()].float()


def _last(hidden: Tensor, packed: PackedBatch) -> Tensor:
    return hidden[packed.cu_seqlens[1:].long() - 1].float()


def _reduced(states: Tensor, packed: PackedBatch, how: str) -> Tensor:
    # Unsafe: PyTorch would wait for the device to look at the lengths.
    return torch.segment_reduce(states.float(), how, lengths=_lengths(packed), unsafe=True)


def _lengths(packed: PackedBatch) -> Tensor:
    return packed.cu_seqlens.long().diff()


def _mean(hidden: Tensor, packed: PackedBatch) -> Tensor:
    return _reduced(hidden, packed, "mean")


def _max(hidden: Tensor, packed: PackedBatch) -> Tensor:
    return _reduced(hidden, packed, "max")


def _mean_sqrt_length(hidden: Tensor, packed: PackedBatch) -> Tensor:
    return _reduced(hidden, packed, "sum") / _lengths(packed).sqrt()[:, None]


def _weighted_mean(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """The first token counts once, the second twice, and so on."""
    offsets = packed.offsets
    places = np.arange(1, packed.tokens + 1) - np.repeat(offsets[:-1], np.diff(offsets))
    weights = to_device(packed.device, places.astype(np.float32))[:, None]
    lengths = _lengths(packed).float()
    total = lengths * (lengths + 1) / 2
    return _reduced(hidden.float() * weights, packed, "sum") / total[:, None]


_POOLINGS: dict[str, Callable[[Tensor, PackedBatch], Tensor]] = {
    "cls": _first,
    "last_token": _last,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_length": _mean_sqrt_length,
    "weighted_mean": _weighted_mean,
}


def load_steps(
    steps: Sequence[Step], width: int, device: torch.device
) -> tuple[list[Callable[[Tensor], Tensor]], int]:
    """What is done with vectors of `width` numbers after the pooling, and how many are left.

    Raises `StartupError` where a projection does not fit, or is not known here.
    """
    made: list[Callable[[Tensor], Tensor]] = []
    for step in steps:
        if isinstance(step, Normalization):
            made.append(_normalize)
            continue
        if step.in_features != width:
            raise StartupError(
                f"the projection in {step.folder} takes {step.in_features} numbers, and there are "
                f"{width}"
            )
        made.append(_LinearStep(step, device))
        width = step.out_features
    return made, width


def _normalize(vectors: Tensor) -> Tensor:
    return functional.normalize(vectors, dim=-1)


class _LinearStep:
    """A linear layer with an activation, and what it reads added again where it is residual."""

    def __init__(self, step: Projection, device: torch.device) -> None:
        self._linear = _linear(step, "linear", device, bias=step.bias)
        self._activation = _activation(step.folder, step.activation)
        same = step.in_features == step.out_features
        self._residual = (
            None if same or not step.residual else _linear(step, "residual", device, bias=False)
        )
        self._adds = step.residual

    def __call__(self, vectors: Tensor) -> Tensor:
        made = self._activation(self._linear(vectors))
        if not self._adds:
            return made
        return made + (vectors if self._residual is None else self._residual(vectors))


def _linear(step: Projection, name: str, device: torch.device, *, bias: bool) -> nn.Linear:
    weights = Weights.read(step.folder)
    linear = weights.linear(name, step.in_features, step.out_features, bias=bias)
    return linear.to(device, torch.float32)


def _activation(folder: Path, name: str) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise StartupError(f"the projection in {folder} has the activation {name}; known: {known}")
    return _ACTIVATIONS[name]

"""How far the states of an encoder reach, channel by channel."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.models.attention import Kernel
from app.models.encoder import make_layer
from app.models.encoder_parameters import EncoderParameters
from app.models.norm import SumNorm
from app.models.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class Reach:
    """The largest absolute value of each channel, `[hidden]`, in the output of each norm.

    `before` are those that the layers read, `between` those between their halves.
    """

    before: list[Tensor]
    between: list[Tensor]


def reach_of(parameters: EncoderParameters, kernel: Kernel, packed: PackedBatch) -> Reach:
    """Run `packed` through the encoder, of which one layer at a time is in memory."""
    before, between = [], []
    states = parameters.embeddings()(packed)
    for index in range(parameters.config.layers):
        layer = make_layer(parameters, index)
        watched = _Watched(layer.attention_norm)
        before.append(states.abs().amax(0))
        states = replace(layer, attention_norm=watched)(states, packed, kernel)
        between.append(watched.reach)
    return Reach(before, between)


class _Watched:
    """A norm that remembers how far its output reached."""

    def __init__(self, norm: SumNorm) -> None:
        self._norm = norm
        self.reach = torch.zeros(())

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor:
        output = self._norm(states, residual)
        self.reach = torch.maximum(self.reach, output.abs().amax(0))
        return output

"""BERT's and RoBERTa's encoder as a plain loop over packed tokens.

It computes what transformers' own modules compute; what those cost beside the matrix products, call
by call and layer by layer, is not there. The tests compare the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.models.architectures.bert.embeddings import Embeddings
from app.models.architectures.bert.parameters import EncoderParameters
from app.models.architectures.layers import few_of, in_blocks
from app.models.attention.choose import Kernel
from app.models.batch.packing import PackedBatch
from app.models.ops.linear import Linear, make_linear
from app.models.ops.norm import SumNorm, make_sum_norm

# `[T, hidden]` of a packed batch to the same of the next layer.
Step = Callable[[Tensor, PackedBatch, Kernel], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: attention and feed-forward, each added to its input and normalised after."""

    heads: int
    to_query_key_value: Linear
    from_attended: Linear
    attention_norm: SumNorm
    to_inner: Linear
    from_inner: Linear
    output_norm: SumNorm

    def __call__(self, states: Tensor, packed: PackedBatch, kernel: Kernel) -> Tensor:
        """The next states."""
        attended = attend(self.to_query_key_value(states), self.heads, packed, kernel)
        return in_blocks(self._feed_forward, attended, states)

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        states = self.attention_norm(self.from_attended(attended), states)
        return self.output_norm(self.from_inner(self.to_inner(states)), states)


def attend(projected: Tensor, heads: int, packed: PackedBatch, kernel: Kernel) -> Tensor:
    """Attention `[T, hidden]` over query, key and value side by side, `[T, 3 hidden]`."""
    query, key, value = projected.view(len(projected), 3, heads, -1).permute(1, 2, 0, 3)
    scale = query.shape[-1] ** -0.5
    return kernel(query, key, value, packed, scale=scale, causal=False).flatten(1)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Maps a packed batch to the hidden state of every token, in `dtype`."""

    embeddings: Embeddings
    layers: Sequence[Step]
    kernel: Kernel
    dtype: torch.dtype

    def __call__(self, packed: PackedBatch) -> Tensor:
        """`[T, hidden]`: the last hidden state of every token."""
        states = self.embeddings(packed)
        for layer in self.layers:
            states = layer(states, packed, self.kernel)
        return states.to(self.dtype)

    def settle(self) -> None:
        """Copy what was left in the file; forwards may run beside it."""
        self.embeddings.tokens.settle()

    def shallow(self) -> "Encoder":
        """The same with few of its layers, each of which costs what any other does."""
        return replace(self, layers=few_of(self.layers))


def make_encoder(parameters: EncoderParameters, kernel: Kernel) -> Encoder:
    """The encoder with the parameters of a checkpoint, in their dtype and on their device."""
    layers = [make_layer(parameters, index) for index in range(parameters.config.layers)]
    return Encoder(parameters.embeddings(), layers, kernel, parameters.dtype)


def make_layer(parameters: EncoderParameters, index: int) -> Layer:
    """The layer number `index`."""
    layer = parameters.layer(index)
    return Layer(
        heads=parameters.config.heads,
        to_query_key_value=make_linear(layer.projections),
        from_attended=make_linear([layer.attended]),
        attention_norm=make_sum_norm(layer.attention_norm, parameters.dtype),
        to_inner=make_linear([layer.inner], parameters.config.activation),
        from_inner=make_linear([layer.output]),
        output_norm=make_sum_norm(layer.output_norm, parameters.dtype),
    )

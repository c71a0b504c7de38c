"""BERT's and RoBERTa's encoder as a plain loop over packed tokens: the fast path of the CPU.

It computes what transformers' own modules compute, with their weights; what those cost beside the
matrix products, call by call and layer by layer, is gone. The tests compare the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from app.models.attention import Kernel
from app.models.linear import ACTIVATIONS, Linear, make_linear
from app.models.packing import PackedBatch

# `[T, hidden]` of a packed batch to the same of the next layer.
Step = Callable[[Tensor, PackedBatch, Kernel], Tensor]
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Norm:
    """Layer normalisation over the last dimension, in float32 whatever it is given."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Self:
        """The parameters of transformers' module."""
        return cls(module.weight.detach().float(), module.bias.detach().float(), module.eps)

    def __call__(self, states: Tensor) -> Tensor:
        """In the dtype of `states`."""
        return functional.layer_norm(
            states, self.weight.shape, self.weight, self.bias, self.epsilon
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: attention and feed-forward, each added to its input and normalised after."""

    heads: int
    to_query_key_value: Linear
    from_attended: Linear
    attention_norm: Norm
    to_inner: Linear
    from_inner: Linear
    output_norm: Norm

    def __call__(self, states: Tensor, packed: PackedBatch, kernel: Kernel) -> Tensor:
        """The next states."""
        attended = attend(self.to_query_key_value(states), self.heads, packed, kernel)
        return in_blocks(self._feed_forward, attended, states)

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        states = self.attention_norm(self.from_attended(attended).add_(states))
        return self.output_norm(self.from_inner(self.to_inner(states)).add_(states))


def attend(projected: Tensor, heads: int, packed: PackedBatch, kernel: Kernel) -> Tensor:
    """Attention `[T, hidden]` over query, key and value side by side, `[T, 3 hidden]`."""
    query, key, value = projected.view(len(projected), 3, heads, -1).permute(1, 2, 0, 3)
    scale = query.shape[-1] ** -0.5
    return kernel(query, key, value, packed, scale=scale, causal=False).flatten(1)


def in_blocks(step: Callable[[Tensor, Tensor], Tensor], attended: Tensor, states: Tensor) -> Tensor:
    """`step`, which looks at each row by itself, a few rows at a time.

    What it holds between two products would else be too large for the cache, and at 32 MiB too
    large for what the allocator keeps: pages that are new cost more than a pass over them.
    """
    if len(states) <= _ROWS_AT_ONCE:
        return step(attended, states)
    parts = (torch.split(each, _ROWS_AT_ONCE) for each in (attended, states))
    return torch.cat([step(*part) for part in zip(*parts, strict=True)])


class Encoder:
    """Maps a packed batch to the hidden state of every token, in `dtype`."""

    def __init__(
        self, embeddings: "Embeddings", layers: list[Step], kernel: Kernel, dtype: torch.dtype
    ) -> None:
        self._embeddings = embeddings
        self._layers = layers
        self._kernel = kernel
        self._dtype = dtype

    def __call__(self, packed: PackedBatch) -> Tensor:
        """`[T, hidden]`: the last hidden state of every token."""
        states = self._embeddings(packed)
        for layer in self._layers:
            states = layer(states, packed, self._kernel)
        return states.to(self._dtype)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The sum of what a token, its place and its type mean, normalised."""

    tokens: Tensor
    places: Tensor
    # Every token is of type 0.
    type: Tensor
    norm: Norm

    @classmethod
    def of(cls, module: Any) -> Self:
        """The parameters of transformers' module."""
        return cls(
            module.word_embeddings.weight.detach(),
            module.position_embeddings.weight.detach(),
            module.token_type_embeddings.weight.detach()[0],
            Norm.of(module.LayerNorm),
        )

    def __call__(self, packed: PackedBatch) -> Tensor:
        """`[T, hidden]`: the states that the first layer reads."""
        states = functional.embedding(packed.input_ids[0], self.tokens).to(self.places.dtype)
        # The order of the sum is that of transformers.
        states = states.add_(self.type)
        return self.norm(states.add_(functional.embedding(packed.position_ids[0], self.places)))


def make_encoder(model: PreTrainedModel, kernel: Kernel) -> Encoder:
    """Take the weights of `model` over, layer by layer: it is of no use afterwards."""
    parts: Any = model
    layers: list[Step] = []
    for module in parts.encoder.layer:
        layers.append(_layer_of(module, model.config.hidden_act))
        # Weights laid out anew would otherwise be held twice until the last layer.
        module.to_empty(device="meta")
    return Encoder(Embeddings.of(parts.embeddings), layers, kernel, model.dtype)


def can_take(model: PreTrainedModel) -> bool:
    """Whether `Encoder` computes what this model computes."""
    config = model.config
    return (
        config.model_type in {"xlm-roberta", "roberta", "bert"}
        and config.hidden_act in ACTIVATIONS
        and not config.is_decoder
    )


def _layer_of(module: Any, activation: str) -> Layer:
    """The layer that transformers' module holds the weights of."""
    attention = module.attention.self
    return Layer(
        heads=attention.num_attention_heads,
        to_query_key_value=make_linear([attention.query, attention.key, attention.value]),
        from_attended=make_linear([module.attention.output.dense]),
        attention_norm=Norm.of(module.attention.output.LayerNorm),
        to_inner=make_linear([module.intermediate.dense], activation),
        from_inner=make_linear([module.output.dense]),
        output_norm=Norm.of(module.output.LayerNorm),
    )

"""BERT's and RoBERTa's encoder as a plain loop over packed tokens: the fast path of the CPU.

It computes what transformers' own modules compute, with their weights; what those cost beside the
matrix products, call by call and layer by layer, is gone. The tests compare the two.
"""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from app.models.attention import Kernel
from app.models.linear import ACTIVATIONS, Linear, make_linear
from app.models.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class _Norm:
    """Layer normalisation over the last dimension."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Self:
        return cls(module.weight.detach().float(), module.bias.detach().float(), module.eps)

    def __call__(self, states: Tensor) -> Tensor:
        return functional.layer_norm(
            states, self.weight.shape, self.weight, self.bias, self.epsilon
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer: attention and feed-forward, each added to its input and normalised after."""

    heads: int
    to_query_key_value: Linear
    from_attended: Linear
    attention_norm: _Norm
    to_inner: Linear
    from_inner: Linear
    output_norm: _Norm

    def __call__(self, states: Tensor, packed: PackedBatch, kernel: Kernel) -> Tensor:
        attended = self._attend(self.to_query_key_value(states), packed, kernel)
        states = self.attention_norm(self.from_attended(attended).add_(states))
        return self.output_norm(self.from_inner(self.to_inner(states)).add_(states))

    def _attend(self, projected: Tensor, packed: PackedBatch, kernel: Kernel) -> Tensor:
        split = projected.view(len(projected), 3, self.heads, -1)
        query, key, value = split.permute(1, 2, 0, 3)
        scale = query.shape[-1] ** -0.5
        return kernel(query, key, value, packed, scale=scale, causal=False).flatten(1)


class Encoder:
    """Maps a packed batch to the hidden state of every token."""

    def __init__(self, model: PreTrainedModel, kernel: Kernel) -> None:
        """Take the weights of `model` over, layer by layer: it is of no use afterwards."""
        parts: Any = model
        self._embeddings = parts.embeddings
        self._norm = _Norm.of(parts.embeddings.LayerNorm)
        self._kernel = kernel
        activation = model.config.hidden_act
        self._layers = [_take(layer, activation) for layer in parts.encoder.layer]

    def __call__(self, packed: PackedBatch) -> Tensor:
        """`[T, hidden]`: the last hidden state of every token."""
        states = self._norm(self._embed(packed))
        for layer in self._layers:
            states = layer(states, packed, self._kernel)
        return states

    def _embed(self, packed: PackedBatch) -> Tensor:
        parts = self._embeddings
        states: Tensor = parts.word_embeddings(packed.input_ids[0])
        # Every token is of type 0. The order of the sum is that of transformers.
        states = states.add_(parts.token_type_embeddings.weight[0])
        return states.add_(parts.position_embeddings(packed.position_ids[0]))


def can_take(model: PreTrainedModel) -> bool:
    """Whether `Encoder` computes what this model computes."""
    config = model.config
    return (
        config.model_type in {"xlm-roberta", "roberta", "bert"}
        and config.hidden_act in ACTIVATIONS
        and not config.is_decoder
    )


def _take(layer: Any, activation: str) -> _Layer:
    attention = layer.attention.self
    taken = _Layer(
        heads=attention.num_attention_heads,
        to_query_key_value=make_linear([attention.query, attention.key, attention.value]),
        from_attended=make_linear([layer.attention.output.dense]),
        attention_norm=_Norm.of(layer.attention.output.LayerNorm),
        to_inner=make_linear([layer.intermediate.dense], activation),
        from_inner=make_linear([layer.output.dense]),
        output_norm=_Norm.of(layer.output.LayerNorm),
    )
    # Weights laid out anew would otherwise be held twice until the last layer.
    layer.to_empty(device="meta")
    return taken

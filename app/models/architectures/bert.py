"""BERT's, RoBERTa's and XLM-RoBERTa's encoder as a plain loop over packed tokens.

The tests compare it with transformers' modules, which compute the same and spend more time between
the matrix products.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.models.architectures.bert_config import EncoderConfig
from app.models.architectures.transformer import (
    LayeredTransformer,
    Parameters,
    in_row_blocks,
    preemption_point,
)
from app.models.attention.reference import Attention
from app.models.batch.packing import PackedBatch
from app.models.checkpoint.weights import Weights
from app.models.ops.arguments import LayerNorm, Linear
from app.models.ops.backend import Backend

_TOKENS = "embeddings.word_embeddings.weight"

AddNorm = Callable[[Tensor, Tensor, LayerNorm], Tensor]


def plain_add_norm(states: Tensor, other: Tensor, norm: LayerNorm) -> Tensor:
    """The norm of the sum, in the dtype of `states`, which are overwritten."""
    return norm(states.add_(other))


@dataclass(frozen=True, slots=True)
class Embeddings:
    """On a CPU: the normalised sum of the embeddings of a token, its position and its type.

    `tokens` is `[vocabulary, width]`, half of a model like bge-m3, maybe in a shorter dtype.
    `type` `[width]` is type 0, which is added to every token. `positions` is
    `[types x positions, width]`: the positions of type 0, then those of the second segment, to
    which the difference of type 1 and type 0 is added.
    """

    tokens: Tensor
    positions: Tensor
    type: Tensor
    norm: LayerNorm
    add_norm: AddNorm = plain_add_norm

    def __call__(self, packed: PackedBatch) -> Tensor:
        """`[T, width]`: the states that the first layer reads."""
        states = functional.embedding(packed.input_ids[0], self.tokens)
        states = states.to(self.positions.dtype).add_(self.type)
        positions = functional.embedding(packed.position_ids[0], self.positions)
        return self.add_norm(states, positions, self.norm)


@dataclass(frozen=True, slots=True)
class GpuEmbeddings:
    """The same on a GPU: `tokens` is `[vocabulary, width]`, and `positions` contains the types."""

    backend: Backend
    tokens: Tensor
    positions: Tensor
    norm: LayerNorm

    def __call__(self, packed: PackedBatch) -> Tensor:
        """`[T, width]`: the states that the first layer reads."""
        indices = packed.input_ids[0], packed.position_ids[0]
        return self.backend.embed(indices, (self.tokens, self.positions), self.norm)


@dataclass(frozen=True, slots=True)
class EncoderLayerParameters:
    """One layer's matrices and norms."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    attended: nn.Linear
    attention_norm: LayerNorm
    inner: nn.Linear
    output: nn.Linear
    output_norm: LayerNorm

    @property
    def projections(self) -> list[nn.Linear]:
        """Query, key and value, which read the same states."""
        return [self.query, self.key, self.value]


class EncoderParameters(Parameters):
    """The parameters layer by layer, under the names that transformers gives them."""

    def __init__(
        self, weights: Weights, config: EncoderConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(weights, device, dtype, tokens=_TOKENS)
        self.config = config

    def _get_all(self) -> None:
        self._tokens_table()
        self._positions_and_types()
        self._norm("embeddings")
        for index in range(self.config.layers):
            self.layer(index)

    def embeddings(
        self, add_norm: AddNorm = plain_add_norm, dtype: torch.dtype | None = None
    ) -> Embeddings:
        """The embedding on a CPU; its tables are in `dtype` where that is not the parameters'."""
        dtype = dtype or self.dtype
        positions, types = self._positions_and_types()
        return Embeddings(
            tokens=self._tokens_table(dtype),
            positions=_of_each_type(positions, types).to(self.device, dtype),
            type=types[0].to(self.device, dtype),
            norm=self._norm("embeddings"),
            add_norm=add_norm,
        )

    def gpu_embeddings(self, backend: Backend) -> GpuEmbeddings:
        """The embedding on a GPU."""
        positions, types = self._positions_and_types()
        # Not summed in the order of transformers, which would take one more pass.
        positions = _of_each_type(positions.float() + types[0].float(), types)
        return GpuEmbeddings(
            backend,
            self._tokens_table(),
            positions.to(self.device, self.dtype),
            self._norm("embeddings"),
        )

    def _tokens_table(self, dtype: torch.dtype | None = None) -> Tensor:
        return self._get(_TOKENS, self.config.vocabulary, self.config.width, dtype=dtype)

    def _positions_and_types(self) -> tuple[Tensor, Tensor]:
        config, get = self.config, self._weights.get
        types = get("embeddings.token_type_embeddings.weight", config.types, config.width)
        types = types if config.reads_segments else types[:1]
        positions = get("embeddings.position_embeddings.weight", config.positions, config.width)
        return positions, types

    def layer(self, index: int) -> EncoderLayerParameters:
        """The layer number `index`."""
        width, inner_width = self.config.width, self.config.inner_width
        name = f"encoder.layer.{index}"
        return EncoderLayerParameters(
            query=self._linear(f"{name}.attention.self.query", width, width),
            key=self._linear(f"{name}.attention.self.key", width, width),
            value=self._linear(f"{name}.attention.self.value", width, width),
            attended=self._linear(f"{name}.attention.output.dense", width, width),
            attention_norm=self._norm(f"{name}.attention.output"),
            inner=self._linear(f"{name}.intermediate.dense", width, inner_width),
            output=self._linear(f"{name}.output.dense", inner_width, width),
            output_norm=self._norm(f"{name}.output"),
        )

    def _norm(self, name: str) -> LayerNorm:
        # Only on a CPU PyTorch accepts parameters that are more exact than the states.
        dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        weight, bias = (
            self._get(f"{name}.LayerNorm.{parameter}", self.config.width, dtype=dtype)
            for parameter in ("weight", "bias")
        )
        return LayerNorm(weight, bias, self.config.epsilon)


def _of_each_type(positions: Tensor, types: Tensor) -> Tensor:
    """`[types x positions, width]`: `positions`, then with the difference of each other type."""
    if len(types) == 1:
        return positions
    types = types.float()
    return torch.cat([positions.float() + (each - types[0]) for each in types])


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Attention and feed-forward, each added to its input and normalised after."""

    backend: Backend
    heads: int
    to_query_key_value: Linear
    from_attended: Linear
    attention_norm: LayerNorm
    to_inner: Linear
    from_inner: Linear
    output_norm: LayerNorm

    def __call__(self, states: Tensor, packed: PackedBatch, attend: Attention) -> Tensor:
        """The next states."""
        attended = self_attention(self.to_query_key_value(states), self.heads, packed, attend)
        return in_row_blocks(self._feed_forward, attended, states)

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        add_norm = self.backend.add_norm
        states = add_norm(self.from_attended(attended), states, self.attention_norm)
        return add_norm(self.from_inner(self.to_inner(states)), states, self.output_norm)


def self_attention(projected: Tensor, heads: int, packed: PackedBatch, attend: Attention) -> Tensor:
    """Attention `[T, hidden]` over query, key and value side by side, `[T, 3 hidden]`."""
    preemption_point()
    query, key, value = projected.view(len(projected), 3, heads, -1).permute(1, 2, 0, 3)
    scale = query.shape[-1] ** -0.5
    return attend(query, key, value, packed, scale=scale, causal=False).flatten(1)


@dataclass(frozen=True, slots=True)
class Encoder(LayeredTransformer):
    """The encoder; its states are returned in `dtype`, whatever the layers compute in."""

    embeddings: Embeddings | GpuEmbeddings
    dtype: torch.dtype

    def __call__(self, packed: PackedBatch) -> Tensor:
        """Implement `Transformer`."""
        return self.run_layers(self.embeddings(packed), packed).to(self.dtype)


def make_encoder(parameters: EncoderParameters, backend: Backend) -> Encoder:
    """The encoder with the parameters of a checkpoint, in their dtype and on their device."""
    on_cpu = parameters.device.type == "cpu"
    embeddings = (
        parameters.embeddings(backend.add_norm) if on_cpu else parameters.gpu_embeddings(backend)
    )
    layers = [_layer(parameters, index, backend) for index in range(parameters.config.layers)]
    return Encoder(layers, backend.attend, embeddings, parameters.dtype)


def _layer(parameters: EncoderParameters, index: int, backend: Backend) -> EncoderLayer:
    layer = parameters.layer(index)
    return EncoderLayer(
        backend=backend,
        heads=parameters.config.heads,
        to_query_key_value=backend.linear(layer.projections),
        from_attended=backend.linear([layer.attended]),
        attention_norm=layer.attention_norm,
        to_inner=backend.linear([layer.inner], parameters.config.activation),
        from_inner=backend.linear([layer.output]),
        output_norm=layer.output_norm,
    )

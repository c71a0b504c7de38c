"""BERT's, RoBERTa's and XLM-RoBERTa's encoder as a plain loop over packed tokens.

First its configuration, then the layers, then their parameters as they are read from a checkpoint
for a CPU or a GPU. The tests compare it with transformers' modules, which compute the same and
spend more time between the matrix products.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from smart_embedder.errors import StartupError
from smart_embedder.models.attention.dense import Attention
from smart_embedder.models.batch.packing import PackedBatch, PositionScheme
from smart_embedder.models.checkpoint.config import number, read_config, whole_number
from smart_embedder.models.checkpoint.weights import Weights
from smart_embedder.models.families.backbone import (
    LayeredTransformer,
    Parameters,
    attend_by_heads,
    in_row_blocks,
)
from smart_embedder.models.ops.backend import ACTIVATIONS, Backend, LayerNorm, Linear

_ROBERTA = ("xlm-roberta", "roberta", "camembert")
ENCODER_TYPES = (*_ROBERTA, "bert")
_SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "inner_width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
    "types": "type_vocab_size",
}
# The defaults of transformers' classes, for values that the file leaves out.
_DEFAULTS = {"type_vocab_size": 2, "max_position_embeddings": 512}
_DEFAULT_PADDING = 1
_DEFAULT_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes and kinds from `config.json`; RoBERTa counts positions from `padding` + 1."""

    vocabulary: int
    width: int
    inner_width: int
    layers: int
    heads: int
    positions: int
    types: int
    activation: str
    epsilon: float
    padding: int | None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read it; raises `StartupError` for another kind of model, and for impossible values."""
        config = read_config(folder)
        model_type = config.get("model_type")
        if model_type not in ENCODER_TYPES:
            known = ", ".join(ENCODER_TYPES)
            raise StartupError(f"{folder} holds a model of type {model_type}; known here: {known}")
        if config.get("is_decoder"):
            raise StartupError(f"{folder} holds a decoder; an encoder is needed")
        require_positions(folder, config)
        size = {
            name: whole_number(folder, config, key, _DEFAULTS.get(key))
            for name, key in _SIZES.items()
        }
        if size["width"] % size["heads"]:
            raise StartupError(
                f"{folder} has states of {size['width']} numbers, which {size['heads']} heads "
                "cannot share"
            )
        activation = config.get("hidden_act", "gelu")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            known = ", ".join(filter(None, ACTIVATIONS))
            raise StartupError(f"{folder} has the activation {activation}; known here: {known}")
        padding = None
        if model_type in _ROBERTA:
            padding = whole_number(folder, config, "pad_token_id", _DEFAULT_PADDING, least=0)
        return cls(
            **size,
            activation=activation,
            epsilon=number(folder, config, "layer_norm_eps", _DEFAULT_EPSILON),
            padding=padding,
        )

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence, by its positions."""
        return self.positions - (0 if self.padding is None else self.padding + 1)

    @property
    def reads_segments(self) -> bool:
        """Whether the second text of a pair has another type of token; RoBERTa has none."""
        return self.padding is None and self.types > 1

    @property
    def position_scheme(self) -> PositionScheme:
        """How tokens are numbered; as in `Embeddings`, those of the second segment come last."""
        return PositionScheme(self.padding, self.max_length if self.reads_segments else 0)

    @property
    def parameters(self) -> int:
        """The number of weights that each token is multiplied with."""
        return self.layers * self.width * (4 * self.width + 2 * self.inner_width)


def require_positions(folder: Path, config: dict[str, Any]) -> None:
    """Raise `StartupError` for a kind of positions that nothing computes, transformers included."""
    kind = str(config.get("position_embedding_type"))
    if kind.startswith("relative_key"):
        raise StartupError(
            f"{folder} has positions of type {kind}, which transformers has not computed since "
            "version 5"
        )


@dataclass(frozen=True, slots=True)
class Embeddings:
    """On a CPU: the normalised sum of the embeddings of a token, its position and its type.

    `tokens` is `[vocabulary, width]`, half of a model like bge-m3, maybe in a shorter dtype.
    `type` `[width]` is type 0, which is added to every token. `positions` is
    `[types x positions, width]`: the positions of type 0, then those of the second segment, to
    which the difference of type 1 and type 0 is added.
    """

    backend: Backend
    tokens: Tensor
    positions: Tensor
    type: Tensor
    norm: LayerNorm

    def __call__(self, packed: PackedBatch) -> Tensor:
        """`[T, width]`: the states that the first layer reads."""
        states = functional.embedding(packed.input_ids[0], self.tokens)
        states = states.to(self.positions.dtype).add_(self.type)
        positions = functional.embedding(packed.position_ids[0], self.positions)
        return self.backend.add_norm(states, positions, self.norm)


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


_TOKENS = "embeddings.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class EncoderLayerParameters:
    """One layer's matrices and norms; the projections are those of query, key and value."""

    projections: list[nn.Linear]
    attended: nn.Linear
    attention_norm: LayerNorm
    inner: nn.Linear
    output: nn.Linear
    output_norm: LayerNorm


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

    def embeddings(self, backend: Backend, dtype: torch.dtype) -> Embeddings:
        """The embedding on a CPU; its tables are in `dtype`, which need not be the parameters'."""
        positions, types = self._positions_and_types()
        return Embeddings(
            backend,
            tokens=self._tokens_table(dtype),
            positions=_of_each_type(positions, types).to(self.device, dtype),
            type=types[0].to(self.device, dtype),
            norm=self._norm("embeddings"),
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
            projections=[
                self._linear(f"{name}.attention.self.{each}", width, width)
                for each in ("query", "key", "value")
            ],
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
        projected = in_row_blocks(self.to_query_key_value, states)
        attended = self_attention(projected, self.heads, packed, attend)
        return in_row_blocks(self._feed_forward, attended, states)

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        add_norm = self.backend.add_norm
        states = add_norm(self.from_attended(attended), states, self.attention_norm)
        return add_norm(self.from_inner(self.to_inner(states)), states, self.output_norm)


def self_attention(projected: Tensor, heads: int, packed: PackedBatch, attend: Attention) -> Tensor:
    """Attention `[T, hidden]` over query, key and value side by side, `[T, 3 hidden]`."""
    query, key, value = projected.view(len(projected), 3, heads, -1).permute(1, 2, 0, 3)
    scale = query.shape[-1] ** -0.5
    attended = attend_by_heads(attend, (query, key, value), packed, scale=scale, causal=False)
    return attended.flatten(1)


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
    embeddings = (
        parameters.embeddings(backend, parameters.dtype)
        if parameters.device.type == "cpu"
        else parameters.gpu_embeddings(backend)
    )
    layers = [_layer(parameters, index, backend) for index in range(parameters.config.layers)]
    return Encoder(layers, backend.attention, embeddings, parameters.dtype)


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

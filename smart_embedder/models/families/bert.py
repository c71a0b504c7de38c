"""The encoder of BERT, RoBERTa and XLM-RoBERTa as a plain loop over packed tokens.

The tests compare it with transformers' modules, which spend more time between the matrix products.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from smart_embedder.errors import StartupError
from smart_embedder.kernels.attention import Attention
from smart_embedder.kernels.backend import (
    ACTIVATIONS,
    Backend,
    EncoderParts,
    LayerNorm,
    find_activation,
)
from smart_embedder.kernels.native import NativeEncoderLayer
from smart_embedder.kernels.packed_batch import PackedBatch, PositionScheme
from smart_embedder.kernels.target import Shapes
from smart_embedder.models.families.backbone import (
    LayeredTransformer,
    attend_by_heads,
    fits_one_call,
    preemption_point,
    run_in_row_blocks,
)
from smart_embedder.models.files.config import read_config, read_integer, read_number
from smart_embedder.models.files.weights import Weights

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
# The first tensor; its name has this ending in every checkpoint.
TOKENS = "embeddings.word_embeddings.weight"
# transformers' defaults for values that config.json leaves out.
_DEFAULTS = {"type_vocab_size": 2, "max_position_embeddings": 512}
_DEFAULT_PADDING = 1
_DEFAULT_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The configuration in `config.json`; RoBERTa counts positions from `padding` + 1."""

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
        """Read `config.json`; raises `StartupError` for another model type or impossible values."""
        config = read_config(folder)
        model_type = config.get("model_type")
        if model_type not in ENCODER_TYPES:
            known = ", ".join(ENCODER_TYPES)
            raise StartupError(f"{folder} holds a model of type {model_type}; supported: {known}")
        if config.get("is_decoder") or config.get("is_causal"):
            raise StartupError(f"{folder} holds a decoder; an encoder is needed")
        require_positions(folder, config)
        size = {
            name: read_integer(folder, config, key, _DEFAULTS.get(key))
            for name, key in _SIZES.items()
        }
        if size["width"] % size["heads"]:
            raise StartupError(
                f"{folder} has states of {size['width']} numbers, which {size['heads']} heads "
                "cannot share"
            )
        activation = find_activation(config.get("hidden_act", "gelu"))
        if activation is None:
            known = ", ".join(filter(None, ACTIVATIONS))
            raise StartupError(
                f"{folder} has the activation {config['hidden_act']}; supported: {known}"
            )
        padding = None
        if model_type in _ROBERTA:
            padding = read_integer(folder, config, "pad_token_id", _DEFAULT_PADDING, least=0)
        return cls(
            **size,
            activation=activation,
            epsilon=read_number(folder, config, "layer_norm_eps", _DEFAULT_EPSILON),
            padding=padding,
        )

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence, for which there are positions."""
        return self.positions - (0 if self.padding is None else self.padding + 1)

    @property
    def reads_segments(self) -> bool:
        """Whether the second text of a pair has another type of token; RoBERTa has none."""
        return self.padding is None and self.types > 1

    @property
    def position_scheme(self) -> PositionScheme:
        """How positions are counted; those of the second segment follow all others."""
        return PositionScheme(self.padding, self.max_length if self.reads_segments else 0)

    @property
    def shapes(self) -> Shapes:
        """The sizes of the layers."""
        return Shapes(
            self.width,
            self.inner_width,
            self.heads,
            self.heads,
            self.width // self.heads,
            activation=self.activation,
        )

    @property
    def parameters(self) -> int:
        """The number of weights that each token is multiplied with."""
        return self.layers * self.width * (4 * self.width + 2 * self.inner_width)


def is_encoder(config: dict[str, Any]) -> bool:
    """Whether this encoder computes a model with the configuration."""
    is_causal = config.get("is_decoder") or config.get("is_causal")
    activation = find_activation(config.get("hidden_act", "gelu"))
    return config.get("model_type") in ENCODER_TYPES and not is_causal and activation is not None


def require_positions(folder: Path, config: dict[str, Any]) -> None:
    """Raise `StartupError` for relative positions, which transformers does not compute either."""
    kind = str(config.get("position_embedding_type"))
    if kind.startswith("relative_key"):
        raise StartupError(
            f"{folder} has positions of type {kind}, which transformers has not computed since "
            "version 5"
        )


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The normalised sum of the embeddings of a token, its position and its type.

    `tokens` is `[vocabulary, width]`, half of the weights of a model like bge-m3. `positions` is
    `[types x positions, width]`: the positions of the first segment, then those of the second, to
    which the difference of the two types is added. `type` `[width]` is the embedding of type 0,
    which is added to every token. On a GPU it is None, and `positions` include it.
    """

    backend: Backend
    tokens: Tensor
    positions: Tensor
    type: Tensor | None
    norm: LayerNorm

    def __call__(self, packed: PackedBatch) -> Tensor:
        """Return the states `[T, width]` that the first layer reads."""
        ids, positions = packed.input_ids[0], packed.position_ids[0]
        if self.type is None:
            return self.backend.embed((ids, positions), (self.tokens, self.positions), self.norm)
        states = functional.embedding(ids, self.tokens).add_(self.type)
        positions = functional.embedding(positions, self.positions)
        return self.backend.add_norm(states, positions, self.norm)


def read_embeddings(
    weights: Weights, config: EncoderConfig, backend: Backend, dtype: torch.dtype
) -> Embeddings:
    """Read the embeddings; the tables are in `dtype`, the norm in that of the `weights`."""
    tokens = weights.get(TOKENS, config.vocabulary, config.width, dtype=dtype)
    types, positions = (
        weights.get(f"embeddings.{name}.weight", count, config.width, dtype=torch.float32)
        for name, count in (
            ("token_type_embeddings", config.types),
            ("position_embeddings", config.positions),
        )
    )
    first, device = None, weights.device.type
    if device == "cpu":
        first = types[0].to(dtype)
    elif device != "meta":  # transformers adds in another order, which would take one more pass.
        positions = positions + types[0]
    if config.reads_segments and device != "meta":
        positions = torch.cat([positions + (embedding - types[0]) for embedding in types])
    norm = _read_norm(weights, config, "embeddings")
    return Embeddings(backend, tokens, positions.to(dtype), first, norm)


def _read_norm(weights: Weights, config: EncoderConfig, name: str) -> LayerNorm:
    # PyTorch accepts parameters that are more exact than the states only on a CPU.
    dtype = torch.float32 if weights.device.type == "cpu" else None
    weight, bias = (
        weights.get(f"{name}.LayerNorm.{parameter}", config.width, dtype=dtype)
        for parameter in ("weight", "bias")
    )
    return LayerNorm(weight, bias, config.epsilon)


# The most tokens of a batch whose layers are single calls. In a larger batch a layer takes so long
# that a short forward should be able to run in between.
_SMALL_BATCH = 128


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Attention and feed-forward, each added to its input, with a norm after each.

    `calls` computes the layer in one or two calls, if the backend supports that.
    """

    parts: EncoderParts
    calls: NativeEncoderLayer | None

    @classmethod
    def of(cls, parts: EncoderParts) -> Self:
        """Prepare the layer of these parts."""
        return cls(parts, parts.backend.encoder_layer(parts))

    def __call__(
        self, states: Tensor, packed: PackedBatch, attend: Attention, rows: Tensor | None = None
    ) -> Tensor:
        """Return the next states, of all tokens or of the tokens `rows`."""
        parts = self.parts
        calls = self.calls if attend == parts.backend.attention else None
        if calls and len(states) <= _SMALL_BATCH:
            states = calls.forward(states, packed)
            return states if rows is None else states.index_select(0, rows)
        if calls and fits_one_call(len(states), parts.heads * packed.pairs):
            attended = calls.attention(states, packed)
            preemption_point()
        else:
            projected = run_in_row_blocks(parts.to_query_key_value, states)
            attended = self_attention(projected, parts.heads, packed, attend)
        if rows is not None:
            attended, states = attended.index_select(0, rows), states.index_select(0, rows)
        return run_in_row_blocks(
            calls.feed_forward if calls else self._feed_forward, attended, states
        )

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        parts, add_norm = self.parts, self.parts.backend.add_norm
        states = add_norm(parts.from_attended(attended), states, parts.attention_norm)
        return add_norm(parts.from_inner(parts.to_inner(states)), states, parts.output_norm)


def self_attention(projected: Tensor, heads: int, packed: PackedBatch, attend: Attention) -> Tensor:
    """Compute attention `[T, hidden]` for query, key and value side by side, `[T, 3 hidden]`."""
    query, key, value = projected.view(len(projected), 3, heads, -1).permute(1, 2, 0, 3)
    attend_packed = partial(attend, packed=packed, scale=query.shape[-1] ** -0.5, causal=False)
    return attend_by_heads(attend_packed, (query, key, value), packed).flatten(1)


@dataclass(frozen=True, slots=True)
class Encoder(LayeredTransformer):
    """The encoder: embeddings, then layers."""

    embeddings: Embeddings

    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """Implement `Transformer`."""
        states = self.embeddings(packed)
        for index, layer in enumerate(self.layers, 1):
            preemption_point()
            read = rows if index == len(self.layers) else None
            states = layer(states, packed, self.attend, read)
        return states


def read_layer(
    weights: Weights, config: EncoderConfig, index: int, backend: Backend
) -> EncoderLayer:
    """Read the layer number `index`, whose parameters have transformers' names."""
    width, inner_width, name = config.width, config.inner_width, f"encoder.layer.{index}"
    projections = [
        weights.linear(f"{name}.attention.self.{projection}", width, width)
        for projection in ("query", "key", "value")
    ]
    attended = weights.linear(f"{name}.attention.output.dense", width, width)
    inner = weights.linear(f"{name}.intermediate.dense", width, inner_width)
    output = weights.linear(f"{name}.output.dense", inner_width, width)
    parts = EncoderParts(
        backend=backend,
        heads=config.heads,
        to_query_key_value=backend.linear(projections),
        from_attended=backend.linear([attended]),
        attention_norm=_read_norm(weights, config, f"{name}.attention.output"),
        to_inner=backend.linear([inner], config.activation),
        from_inner=backend.linear([output]),
        output_norm=_read_norm(weights, config, f"{name}.output"),
    )
    return EncoderLayer.of(parts)


def make_encoder(weights: Weights, config: EncoderConfig, backend: Backend) -> Encoder:
    """Make the encoder with the parameters of a checkpoint, in the dtype of `weights`."""
    embeddings = read_embeddings(weights, config, backend, weights.dtype or torch.float32)
    layers = [read_layer(weights, config, index, backend) for index in range(config.layers)]
    return Encoder(layers, backend.attention, embeddings)

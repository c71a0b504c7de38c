"""Qwen3's decoder as a plain loop over packed tokens, without generation.

The tests compare it with transformers' modules.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from app.errors import StartupError
from app.models.architectures.transformer import (
    LayeredTransformer,
    Parameters,
    TokenEmbedding,
    in_row_blocks,
    preemption_point,
)
from app.models.attention.reference import Attention
from app.models.batch.packing import PackedBatch
from app.models.checkpoint.config import number, read_config, unusable, whole_number
from app.models.checkpoint.weights import Weights
from app.models.ops.arguments import AddLinear, Linear, RmsNorm, RotaryEmbedding
from app.models.ops.backend import Backend

_SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "inner_width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "positions": "max_position_embeddings",
}
# The defaults of transformers' class, for values that the file leaves out.
_DEFAULT_HEAD_WIDTH = 128
_DEFAULT_EPSILON = 1e-6
_DEFAULT_THETA = 10_000.0
# Options of which only the value of all known models is implemented.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
_TOKENS = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes from `config.json`; the queries' `heads` share the `key_heads`, all `head_width` wide.

    `theta` is the base of the rotary embedding's wave lengths. `tied` says whether the language
    model's head is the token embedding.
    """

    vocabulary: int
    width: int
    inner_width: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    positions: int
    epsilon: float
    theta: float
    tied: bool

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read it; raises `StartupError` for another kind of model, and for impossible values."""
        config = read_config(folder)
        _require_qwen3(folder, config)
        config.setdefault("head_dim", _DEFAULT_HEAD_WIDTH)
        size = {name: whole_number(folder, config, key) for name, key in _SIZES.items()}
        _require_fixed(folder, config)
        if size["heads"] % size["key_heads"] or size["head_width"] % 2:
            raise StartupError(
                f"{folder} has {size['heads']} heads of {size['head_width']} numbers, which "
                f"{size['key_heads']} heads of keys cannot serve"
            )
        return cls(
            **size,
            epsilon=number(folder, config, "rms_norm_eps", _DEFAULT_EPSILON),
            theta=_theta(folder, config),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def parameters(self) -> int:
        """The number of weights that each token is multiplied with."""
        attention = 2 * (self.heads + self.key_heads) * self.head_width
        return self.layers * self.width * (attention + 3 * self.inner_width)


def _require_qwen3(folder: Path, config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type != "qwen3":
        raise StartupError(f"{folder} holds a model of type {model_type}, not a Qwen3 model")


def _require_fixed(folder: Path, config: dict[str, Any]) -> None:
    for key, known in _FIXED.items():
        value = config.get(key, known)
        if value != known:
            raise StartupError(f"{folder} has {key} {value}; known here: {known}")


def _theta(folder: Path, config: dict[str, Any]) -> float:
    """Transformers 5 writes it into `rope_parameters`, and versions before it beside them."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rotary = config.get(key) or {}
    if not isinstance(rotary, dict):
        raise unusable(folder, key, rotary)
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default":
        raise StartupError(f"{folder} has rotary positions of type {kind}; known here: default")
    theta = number(folder, {**config, **rotary}, "rope_theta", _DEFAULT_THETA)
    if not theta:
        raise unusable(folder, "rope_theta", rotary.get("rope_theta", config.get("rope_theta")))
    return theta


@dataclass(frozen=True, slots=True)
class DecoderLayerParameters:
    """One layer's matrices and norms; those of queries and keys are for each head."""

    input_norm: RmsNorm
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    query_norm: RmsNorm
    key_norm: RmsNorm
    attended: nn.Linear
    inner_norm: RmsNorm
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear


class DecoderParameters(Parameters):
    """The parameters layer by layer, under the names that transformers gives them."""

    def __init__(
        self, weights: Weights, config: DecoderConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(weights, device, dtype, tokens=_TOKENS)
        self.config = config

    def embeddings(self) -> TokenEmbedding:
        """The token embedding."""
        self._weights.give_back_pages()
        return self._token_embedding(self.config.vocabulary, self.config.width)

    def final_norm(self) -> RmsNorm:
        """The norm after the last layer."""
        return self._norm("norm", self.config.width)

    def layer(self, index: int) -> DecoderLayerParameters:
        """The layer number `index`."""
        self._weights.give_back_pages()
        config = self.config
        width, inner_width, head = config.width, config.inner_width, config.head_width
        queries, keys = config.heads * head, config.key_heads * head
        name = f"layers.{index}"
        return DecoderLayerParameters(
            input_norm=self._norm(f"{name}.input_layernorm", width),
            query=self._matrix(f"{name}.self_attn.q_proj", width, queries),
            key=self._matrix(f"{name}.self_attn.k_proj", width, keys),
            value=self._matrix(f"{name}.self_attn.v_proj", width, keys),
            query_norm=self._norm(f"{name}.self_attn.q_norm", head),
            key_norm=self._norm(f"{name}.self_attn.k_norm", head),
            attended=self._matrix(f"{name}.self_attn.o_proj", queries, width),
            inner_norm=self._norm(f"{name}.post_attention_layernorm", width),
            gate=self._matrix(f"{name}.mlp.gate_proj", width, inner_width),
            up=self._matrix(f"{name}.mlp.up_proj", width, inner_width),
            down=self._matrix(f"{name}.mlp.down_proj", inner_width, width),
        )

    def _matrix(self, name: str, in_features: int, out_features: int) -> nn.Linear:
        return self._linear(name, in_features, out_features, bias=False)

    def _norm(self, name: str, width: int) -> RmsNorm:
        weight = self._norm_parameter(f"{name}.weight", width, self.dtype)
        return RmsNorm(weight, self.config.epsilon)


def vocabulary_head(weights: Weights, config: DecoderConfig) -> Tensor:
    """The weights `[vocabulary, width]` of the language model's head, as in the file."""
    shape = config.vocabulary, config.width
    if config.tied:
        return weights.before(_TOKENS).get(_TOKENS, *shape)
    return weights.get("lm_head.weight", *shape)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to its input.

    `head_norm` is that of the heads of queries and keys, `[heads + key_heads, width]`.
    """

    backend: Backend
    key_heads: int
    input_norm: RmsNorm
    to_query_key_value: Linear
    head_norm: RmsNorm
    from_attended: AddLinear
    inner_norm: RmsNorm
    to_gate_up: Linear
    from_inner: AddLinear

    def __call__(
        self, states: Tensor, packed: PackedBatch, attend: Attention, rotary: RotaryEmbedding
    ) -> Tensor:
        """The next states."""
        projected = in_row_blocks(self._project, states, rotary.cosines, rotary.sines)
        if packed.sharing is None:
            attended = self._attend(projected, packed, attend)
        else:
            every = projected.index_select(0, packed.sharing.inverse)
            attended = self._attend(every, packed, attend).index_select(0, packed.sharing.unique)
        return in_row_blocks(self._feed_forward, attended, states)

    def _project(self, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Queries, keys and values, `[T, heads + 2 key_heads, width]`."""
        width = self.head_norm.weight.shape[1]
        projected = self.to_query_key_value(self.backend.rms_norm(states, self.input_norm))
        projected = projected.view(len(states), -1, width)
        self.backend.rotary(projected, self.head_norm, RotaryEmbedding(cosines, sines))
        return projected

    def _attend(self, projected: Tensor, packed: PackedBatch, attend: Attention) -> Tensor:
        preemption_point()
        rotated, width = self.head_norm.weight.shape
        heads = [rotated - self.key_heads, self.key_heads, self.key_heads]
        query, key, value = torch.split(projected.transpose(0, 1), heads)
        return attend(query, key, value, packed, scale=width**-0.5, causal=True).flatten(1)

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        states = self.from_attended(attended, states)
        both = self.to_gate_up(self.backend.rms_norm(states, self.inner_norm))
        return self.from_inner(self.backend.gate(both), states)


@dataclass(frozen=True, slots=True)
class Decoder(LayeredTransformer):
    """The decoder; common prefixes of sequences are computed once."""

    shares_prefixes: ClassVar[bool] = True
    embeddings: TokenEmbedding
    final_norm: RmsNorm
    head_width: int
    theta: float

    def __call__(self, packed: PackedBatch) -> Tensor:
        """Implement `Transformer`."""
        token_ids, positions, sharing = packed.input_ids[0], packed.position_ids[0], packed.sharing
        if sharing is not None:
            token_ids, positions = token_ids[sharing.unique], positions[sharing.unique]
        states = self.embeddings(token_ids)
        rotary = RotaryEmbedding.at(positions, self.head_width, self.theta)
        for layer in self.layers:
            preemption_point()
            states = layer(states, packed, self.attend, rotary)
        states = self.final_norm(states)
        return states if sharing is None else states.index_select(0, sharing.inverse)


def make_decoder(parameters: DecoderParameters, backend: Backend) -> Decoder:
    """The decoder with the parameters of a checkpoint, in their dtype and on their device."""
    config = parameters.config
    return Decoder(
        parameters.embeddings(),
        [_layer(parameters, index, backend) for index in range(config.layers)],
        backend.attend,
        parameters.final_norm(),
        config.head_width,
        config.theta,
    )


def _layer(parameters: DecoderParameters, index: int, backend: Backend) -> DecoderLayer:
    config, layer = parameters.config, parameters.layer(index)
    return DecoderLayer(
        backend=backend,
        key_heads=config.key_heads,
        input_norm=layer.input_norm,
        to_query_key_value=backend.linear([layer.query, layer.key, layer.value]),
        head_norm=_join_norms(layer.query_norm, config.heads, layer.key_norm, config.key_heads),
        from_attended=backend.add_linear(layer.attended),
        inner_norm=layer.inner_norm,
        to_gate_up=backend.linear([layer.gate, layer.up]),
        from_inner=backend.add_linear(layer.down),
    )


def _join_norms(query: RmsNorm, queries: int, key: RmsNorm, keys: int) -> RmsNorm:
    weights = [query.weight.expand(queries, -1), key.weight.expand(keys, -1)]
    return RmsNorm(torch.cat(weights), query.epsilon)

"""Qwen3's decoder as a plain loop over packed tokens; it generates no text.

The tests compare it with transformers' modules.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from smart_embedder.errors import StartupError
from smart_embedder.kernels.attention import Attention
from smart_embedder.kernels.backend import (
    AddLinear,
    Backend,
    Linear,
    RmsNorm,
    RotaryEmbedding,
    find_activation,
)
from smart_embedder.kernels.packed_batch import PackedBatch, PositionScheme
from smart_embedder.kernels.target import Shapes
from smart_embedder.models.families.backbone import (
    LayeredTransformer,
    attend_by_heads,
    preemption_point,
    run_in_row_blocks,
)
from smart_embedder.models.files.config import (
    read_config,
    read_integer,
    read_number,
    unusable_value,
)
from smart_embedder.models.files.weights import Weights

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
# The first tensor; its name has this ending in every checkpoint.
TOKENS = "embed_tokens.weight"
# transformers' defaults for values that config.json leaves out.
_DEFAULT_HEAD_WIDTH = 128
_DEFAULT_EPSILON = 1e-6
_DEFAULT_THETA = 10_000.0
# Options that have one value in nearly all models; only that value is computed here.
_LAYER_TYPE, _ROTARY_KIND = "full_attention", "default"
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The configuration in `config.json`.

    `heads` query heads share `key_heads` heads of keys and values; all are `head_width` wide.
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
        """Read `config.json`; raises `StartupError` for another model type or impossible values."""
        config = read_config(folder)
        model_type = config.get("model_type")
        if model_type != "qwen3":
            raise StartupError(f"{folder} holds a model of type {model_type}, not a Qwen3 model")
        config.setdefault("head_dim", _DEFAULT_HEAD_WIDTH)
        size = {name: read_integer(folder, config, key) for name, key in _SIZES.items()}
        other = find_other_option(config)
        if other is not None:
            raise StartupError(f"{folder} has {other}, which is not supported for this use")
        if size["heads"] % size["key_heads"] or size["head_width"] % 2:
            raise StartupError(
                f"{folder} has {size['heads']} heads of {size['head_width']} numbers, which "
                f"{size['key_heads']} heads of keys cannot serve"
            )
        return cls(
            **size,
            epsilon=read_number(folder, config, "rms_norm_eps", _DEFAULT_EPSILON),
            theta=_read_theta(folder, config),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence."""
        return self.positions

    @property
    def position_scheme(self) -> PositionScheme:
        """How positions are counted."""
        return PositionScheme()

    @property
    def shapes(self) -> Shapes:
        """The sizes of the layers."""
        return Shapes(
            self.width,
            self.inner_width,
            self.heads,
            self.key_heads,
            self.head_width,
            bias=False,
            causal=True,
        )

    @property
    def parameters(self) -> int:
        """The number of weights that each token is multiplied with."""
        attention = 2 * (self.heads + self.key_heads) * self.head_width
        return self.layers * self.width * (attention + 3 * self.inner_width)


def find_other_option(config: dict[str, Any]) -> str | None:
    """Return an option that this decoder does not compute, such as `hidden_act gelu`, or None."""
    kinds, rotary = config.get("layer_types") or [], config.get(_rotary_key(config)) or {}
    options = {name: config.get(name, fixed) for name, fixed in _FIXED.items()}
    options["hidden_act"] = find_activation(options["hidden_act"]) or options["hidden_act"]
    for name, fixed in _FIXED.items():
        if options[name] != fixed:
            return f"{name} {options[name]!s:.60}"
    if not isinstance(kinds, list) or any(kind != _LAYER_TYPE for kind in kinds):
        return f"layer_types {kinds!s:.60}"
    # A dictionary of dictionaries has parameters for each kind of layer.
    if not isinstance(rotary, dict) or any(isinstance(value, dict) for value in rotary.values()):
        return f"{_rotary_key(config)} {rotary!s:.60}"
    kind = rotary.get("rope_type", rotary.get("type", _ROTARY_KIND))
    return None if kind == _ROTARY_KIND else f"rotary positions of type {kind}"


def _rotary_key(config: dict[str, Any]) -> str:
    """Return the option of rotary positions that counts, as in transformers, if both exist."""
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def _read_theta(folder: Path, config: dict[str, Any]) -> float:
    """Read `rope_theta`, which transformers 5 writes into `rope_parameters`.

    Older versions write it beside `rope_scaling`.
    """
    rotary = config.get(_rotary_key(config)) or {}
    theta = read_number(folder, {**config, **rotary}, "rope_theta", _DEFAULT_THETA)
    if not theta:
        raise unusable_value(
            folder, "rope_theta", rotary.get("rope_theta", config.get("rope_theta"))
        )
    return theta


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and feed-forward, each with a norm before it, and added to its input.

    `head_norm` normalises the heads of queries and keys, `[heads + key_heads, width]`.
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
        self,
        states: Tensor,
        packed: PackedBatch,
        attend: Attention,
        rotary: RotaryEmbedding,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the next states, of all computed tokens or of the tokens `rows`."""
        projected = run_in_row_blocks(self._project, states, rotary.cosines, rotary.sines)
        if packed.sharing is not None:
            projected = projected.index_select(0, packed.sharing.inverse)
        rotated, width = self.head_norm.weight.shape
        heads = [rotated - self.key_heads, self.key_heads, self.key_heads]
        query, key, value = torch.split(projected.transpose(0, 1), heads)
        attend_packed = partial(attend, packed=packed, scale=width**-0.5, causal=True)
        attended = attend_by_heads(attend_packed, (query, key, value), packed).flatten(1)
        computed = rows
        if packed.sharing is not None:
            rows = packed.sharing.unique if rows is None else rows
            computed = None if computed is None else packed.sharing.inverse[computed]
        if rows is not None:
            attended = attended.index_select(0, rows)
        if computed is not None:
            states = states.index_select(0, computed)
        return run_in_row_blocks(self._feed_forward, attended, states)

    def _project(self, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Return queries, keys and values, `[T, heads + 2 key_heads, width]`."""
        width = self.head_norm.weight.shape[1]
        projected = self.to_query_key_value(self.backend.rms_norm(states, self.input_norm))
        projected = projected.view(len(states), -1, width)
        self.backend.rotary(projected, self.head_norm, RotaryEmbedding(cosines, sines))
        return projected

    def _feed_forward(self, attended: Tensor, states: Tensor) -> Tensor:
        states = self.from_attended(attended, states)
        gate_up = self.to_gate_up(self.backend.rms_norm(states, self.inner_norm))
        return self.from_inner(self.backend.gate(gate_up, "silu"), states)


@dataclass(frozen=True, slots=True)
class Decoder(LayeredTransformer):
    """The decoder; common prefixes of sequences are computed once.

    `embeddings` `[vocabulary, width]` are the embeddings of tokens.
    """

    shares_prefixes: ClassVar[bool] = True
    embeddings: Tensor
    final_norm: RmsNorm
    head_width: int
    theta: float

    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """Implement `Transformer`."""
        token_ids, positions, sharing = packed.input_ids[0], packed.position_ids[0], packed.sharing
        if sharing is not None:
            token_ids, positions = token_ids[sharing.unique], positions[sharing.unique]
        states = functional.embedding(token_ids, self.embeddings)
        rotary = RotaryEmbedding.at(positions, self.head_width, self.theta)
        for index, layer in enumerate(self.layers, 1):
            preemption_point()
            read = rows if index == len(self.layers) else None
            states = layer(states, packed, self.attend, rotary, read)
        states = self.final_norm(states)
        if sharing is None or rows is not None:
            return states
        return states.index_select(0, sharing.inverse)


def read_layer(
    weights: Weights,
    config: DecoderConfig,
    index: int,
    backend: Backend,
    dtype: torch.dtype | None = None,
) -> DecoderLayer:
    """Read the layer number `index`, whose parameters have transformers' names.

    The norms are in `dtype`, by default in that of the `weights`.
    """
    width, inner_width, head_width = config.width, config.inner_width, config.head_width
    heads, key_heads, epsilon = config.heads, config.key_heads, config.epsilon

    def norm(name: str, width: int) -> Tensor:
        weight = weights.get(f"layers.{index}.{name}.weight", width)
        return weight if dtype is None else weight.to(dtype)

    def linear(name: str, in_features: int, out_features: int) -> nn.Linear:
        return weights.linear(f"layers.{index}.{name}", in_features, out_features, bias=False)

    projections = [
        linear(f"self_attn.{name}_proj", width, count * head_width)
        for name, count in (("q", heads), ("k", key_heads), ("v", key_heads))
    ]
    query_norm, key_norm = (norm(f"self_attn.{name}_norm", head_width) for name in "qk")
    # With tensors of `Weights.unread` `torch.cat` would import PyTorch's compiler.
    head_norms = query_norm.new_empty(heads + key_heads, head_width)
    head_norms[:heads], head_norms[heads:] = query_norm, key_norm
    return DecoderLayer(
        backend=backend,
        key_heads=key_heads,
        input_norm=RmsNorm(norm("input_layernorm", width), epsilon),
        to_query_key_value=backend.linear(projections),
        head_norm=RmsNorm(head_norms, epsilon),
        from_attended=backend.add_linear(linear("self_attn.o_proj", heads * head_width, width)),
        inner_norm=RmsNorm(norm("post_attention_layernorm", width), epsilon),
        to_gate_up=backend.linear(
            [linear(f"mlp.{name}_proj", width, inner_width) for name in ("gate", "up")]
        ),
        from_inner=backend.add_linear(linear("mlp.down_proj", inner_width, width)),
    )


def read_ends(
    weights: Weights, config: DecoderConfig, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Read the embeddings of tokens, and the weight of the last norm."""
    embeddings = weights.get(TOKENS, config.vocabulary, config.width, dtype=dtype)
    return embeddings, weights.get("norm.weight", config.width, dtype=dtype)


def make_decoder(weights: Weights, config: DecoderConfig, backend: Backend) -> Decoder:
    """Make the decoder with the parameters of a checkpoint, in the dtype of `weights`."""
    layers = [read_layer(weights, config, index, backend) for index in range(config.layers)]
    embeddings, norm = read_ends(weights, config)
    return Decoder(
        layers, backend.attention, embeddings, RmsNorm(norm, config.epsilon), config.head_width,
        config.theta,
    )  # fmt: skip

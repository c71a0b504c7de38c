"""The configuration of Qwen3."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from app.errors import StartupError
from app.models.checkpoint.config import number, read_config, unusable, whole_number

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

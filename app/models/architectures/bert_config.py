"""The configuration of BERT, RoBERTa and XLM-RoBERTa."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from app.errors import StartupError
from app.models.batch.position_ids import PositionScheme
from app.models.checkpoint.config import number, read_config, whole_number
from app.models.ops.arguments import ACTIVATIONS

_ROBERTA = ("xlm-roberta", "roberta")
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
_DEFAULTS = {"type_vocab_size": 2, "max_position_embeddings": 512, "pad_token_id": 1}
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
        _require_encoder(folder, config)
        size = {name: _whole_number(folder, config, key) for name, key in _SIZES.items()}
        if size["width"] % size["heads"]:
            raise StartupError(
                f"{folder} has states of {size['width']} numbers, which {size['heads']} heads "
                "cannot share"
            )
        roberta = config["model_type"] in _ROBERTA
        return cls(
            **size,
            activation=_activation(folder, config),
            epsilon=number(folder, config, "layer_norm_eps", _DEFAULT_EPSILON),
            padding=_whole_number(folder, config, "pad_token_id", least=0) if roberta else None,
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
        """How tokens are numbered; the positions of the second segment follow those of the first.

        They are so in the table of `app.models.architectures.bert.Embeddings`.
        """
        return PositionScheme(self.padding, self.max_length if self.reads_segments else 0)

    @property
    def parameters(self) -> int:
        """The number of weights that each token is multiplied with."""
        return self.layers * self.width * (4 * self.width + 2 * self.inner_width)


def _require_encoder(folder: Path, config: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in ENCODER_TYPES:
        known = ", ".join(ENCODER_TYPES)
        raise StartupError(f"{folder} holds a model of type {model_type}; known here: {known}")
    if config.get("is_decoder"):
        raise StartupError(f"{folder} holds a decoder; an encoder is needed")
    require_positions(folder, config)


def require_positions(folder: Path, config: dict[str, Any]) -> None:
    """Raise `StartupError` for a kind of positions that nothing computes, transformers included."""
    kind = str(config.get("position_embedding_type"))
    if kind.startswith("relative_key"):
        raise StartupError(
            f"{folder} has positions of type {kind}, which transformers has not computed since "
            "version 5"
        )


def _whole_number(folder: Path, config: dict[str, Any], key: str, least: int = 1) -> int:
    return whole_number(folder, config, key, _DEFAULTS.get(key), least=least)


def _activation(folder: Path, config: dict[str, Any]) -> str:
    name = config.get("hidden_act", "gelu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join(filter(None, ACTIVATIONS))
        raise StartupError(f"{folder} has the activation {name}; known here: {known}")
    return name

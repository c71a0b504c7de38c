"""The heads of transformers' masked language models: from hidden states to the vocabulary."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from app.errors import StartupError
from app.models.backbones.backbone import Backbone
from app.models.checkpoint.config import number, read_config
from app.models.checkpoint.weights import Weights, linear_of
from app.models.ops.arguments import ACTIVATIONS, LayerNorm, Linear


@dataclass(frozen=True, slots=True)
class _Names:
    """The parameters of a family's head, and where `config.json` says its activation and epsilon.

    `decoder` is left out of a file where it is `tokens`, the table that tokens are looked up in.
    Its bias has one of two names, of which the first counts.
    """

    dense: str
    norm: str
    decoder: str
    bias: tuple[str, ...]
    tokens: str
    activation: str | None
    epsilon: str | None = "layer_norm_eps"


_WORDS = "embeddings.word_embeddings.weight"
_BERT = "cls.predictions"
_ROBERTA = _Names(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder.weight",
    bias=("lm_head.decoder.bias", "lm_head.bias"),
    tokens=_WORDS,
    activation=None,
)
# By the type of the model.
_NAMES = {
    "bert": _Names(
        dense=f"{_BERT}.transform.dense",
        norm=f"{_BERT}.transform.LayerNorm",
        decoder=f"{_BERT}.decoder.weight",
        bias=(f"{_BERT}.decoder.bias", f"{_BERT}.bias"),
        tokens=_WORDS,
        activation="hidden_act",
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": _ROBERTA,
    "distilbert": _Names(
        dense="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector.weight",
        bias=("vocab_projector.bias",),
        tokens=_WORDS,
        activation="activation",
        epsilon=None,
    ),
    "modernbert": _Names(
        dense="head.dense",
        norm="head.norm",
        decoder="decoder.weight",
        bias=("decoder.bias",),
        tokens="embeddings.tok_embeddings.weight",
        activation="classifier_activation",
        epsilon="norm_eps",
    ),
}
_DEFAULT_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class MaskedLanguageHead:
    """The logit of every token of the `vocabulary`, from the state of a token."""

    to_transformed: Linear
    norm: LayerNorm
    to_logits: Linear
    vocabulary: int

    def __call__(self, states: Tensor) -> Tensor:
        """`[rows, vocabulary]` of states `[rows, hidden]`, in their dtype."""
        return self.to_logits(self.norm(self.to_transformed(states)))


def load_masked_language_head(
    folder: Path, weights: Weights, backbone: Backbone
) -> MaskedLanguageHead:
    """The head in the model's `folder`, on the backbone's device and in its dtype.

    Raises `StartupError` where it has none, or one of a family that is not known here.
    """
    config = read_config(folder)
    names = _names(folder, config, weights)
    device, dtype, backend = backbone.device, backbone.dtype, backbone.backend
    to_logits = _decoder(weights, names, has_bias=bool(config.get("decoder_bias", True)))
    # The table has as many columns as a token's embedding, and the head's states.
    width = to_logits.in_features
    has_bias = f"{names.dense}.bias" in weights
    dense = weights.linear(names.dense, backbone.hidden_size, width, bias=has_bias)
    return MaskedLanguageHead(
        backend.linear([dense.to(device, dtype)], _activation(folder, config, names)),
        _norm(weights, names.norm, width, _epsilon(folder, config, names), backbone),
        backend.linear([to_logits.to(device, dtype)]),
        to_logits.out_features,
    )


def _decoder(weights: Weights, names: _Names, *, has_bias: bool) -> nn.Linear:
    """The layer from the head's states to the vocabulary's logits."""
    name = names.decoder if names.decoder in weights else names.tokens
    decoder = weights.before(name)
    weight = decoder.get(name, *decoder.tensors[decoder.prefix + name].shape)
    bias = next((each for each in names.bias if each in weights), names.bias[0])
    return linear_of(weight, weights.get(bias, len(weight)) if has_bias else None)


def _names(folder: Path, config: dict[str, Any], weights: Weights) -> _Names:
    kind = config.get("model_type")
    names = _NAMES.get(str(kind))
    if names is None:
        raise StartupError(
            f"{folder} holds a masked language model of type {kind}; known here: "
            f"{', '.join(_NAMES)}"
        )
    if f"{names.dense}.weight" not in weights:
        raise StartupError(f"{folder} lacks the head of a masked language model: {names.dense}")
    return names


def _activation(folder: Path, config: dict[str, Any], names: _Names) -> str:
    name = "gelu" if names.activation is None else config.get(names.activation, "gelu")
    if name not in ACTIVATIONS:
        raise StartupError(f"{folder} has the activation {name}, which is not known here")
    return str(name)


def _epsilon(folder: Path, config: dict[str, Any], names: _Names) -> float:
    if names.epsilon is None:
        return _DEFAULT_EPSILON
    return number(folder, config, names.epsilon, _DEFAULT_EPSILON)


def _norm(weights: Weights, name: str, width: int, epsilon: float, backbone: Backbone) -> LayerNorm:
    # PyTorch takes parameters that are more exact than the states on a CPU alone.
    dtype = torch.float32 if backbone.device.type == "cpu" else backbone.dtype
    weight = weights.get(f"{name}.weight", width)
    has_bias = f"{name}.bias" in weights
    bias = weights.get(f"{name}.bias", width) if has_bias else torch.zeros(width)
    device = backbone.device
    return LayerNorm(
        weight.to(device, dtype, copy=True), bias.to(device, dtype, copy=True), epsilon
    )

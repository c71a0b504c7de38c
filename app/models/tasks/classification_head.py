"""The heads of transformers' models for sequence classification: from hidden states to logits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from app.errors import StartupError
from app.models.backbones.backbone import Backbone
from app.models.batch.packing import PackedBatch
from app.models.checkpoint.config import number, read_config
from app.models.checkpoint.weights import Weights
from app.models.tasks.pooling import first, mean


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a head's layers, and the activation after the dense one.

    That is a module, or the name under which `config.json` says it. A head without a dense layer
    has no bias either. It reads the first token or the last one, or what the configuration says.
    """

    dense: str | None = None
    activation: Callable[[], nn.Module] | str = nn.Identity
    logits: str = "classifier"
    norm: str | None = None
    reads: Literal["first", "last", "configured"] = "first"


_ROBERTA = _Names("classifier.dense", nn.Tanh, "classifier.out_proj")
# By the type of the model.
_NAMES = {
    "bert": _Names("pooler.dense", nn.Tanh),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": _ROBERTA,
    "distilbert": _Names("pre_classifier", nn.ReLU),
    "qwen3": _Names(logits="score", reads="last"),
    "modernbert": _Names(
        "head.dense", "classifier_activation", norm="head.norm", reads="configured"
    ),
}
_POOLINGS = {"cls": first, "mean": mean}
_DEFAULT_EPSILON = 1e-5
_DEFAULT_ACTIVATION = "gelu"


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """Logits of `labels` from one state of each sequence, which `pool` chooses or makes."""

    pool: Callable[[Tensor, PackedBatch], Tensor]
    layers: nn.Module
    labels: tuple[str, ...]

    def __call__(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        """`[N, labels]` float32, in packed order, from the states `[T, hidden]`."""
        pooled = self.pool(hidden, packed).to(hidden.dtype)
        return self.layers(pooled).float()  # type: ignore[no-any-return]


def is_classifier(folder: Path) -> bool:
    """Whether the folder's architecture is one for sequence classification."""
    named = read_config(folder).get("architectures") or [""]
    return str(named[0]).endswith("ForSequenceClassification")


def require_classifier(folder: Path, weights: Weights) -> None:
    """Raise `StartupError` where the folder holds no model for sequence classification."""
    if f"{_names(folder).logits}.weight" not in weights:
        raise StartupError(
            f"{folder} holds an embedding model and not a reranker: it has no classification head"
        )


def load_classification_head(
    folder: Path, weights: Weights, backbone: Backbone
) -> ClassificationHead:
    """The head in the model's `folder`, on the backbone's device and in its dtype."""
    names, width = _names(folder), backbone.hidden_size
    logits = weights.tensors[f"{names.logits}.weight"].shape[0]
    layers: list[nn.Module] = []
    if names.dense is not None:
        # BERT's pooler stands beside its layers, behind the name that they have in the checkpoint.
        of_dense = weights.before(f"{names.dense}.weight")
        has_bias = f"{names.dense}.bias" in of_dense
        layers = [
            of_dense.linear(names.dense, width, width, bias=has_bias),
            _activation(folder, names),
            *([] if names.norm is None else [_norm(folder, weights, names.norm, width)]),
        ]
    layers.append(weights.linear(names.logits, width, logits, bias=names.dense is not None))
    modules = nn.Sequential(*layers).to(backbone.device, backbone.dtype)
    return ClassificationHead(_pooling(folder, names), modules, _labels(folder, logits))


def _names(folder: Path) -> _Names:
    kind = read_config(folder).get("model_type")
    if kind not in _NAMES:
        raise StartupError(
            f"{folder} is no reranker known here, being of type {kind}: use a cross-encoder of "
            f"type {', '.join(_NAMES)}, or Qwen3-Reranker"
        )
    return _NAMES[kind]


def _activation(folder: Path, names: _Names) -> nn.Module:
    if not isinstance(names.activation, str):
        return names.activation()
    # Where a configuration says it, the backbone was loaded by transformers.
    from transformers.activations import ACT2FN  # noqa: PLC0415

    name = str(read_config(folder).get(names.activation, _DEFAULT_ACTIVATION))
    if name not in ACT2FN:
        raise StartupError(
            f"{folder} has the {names.activation} {name}, which transformers does not know"
        )
    return ACT2FN[name]  # type: ignore[no-any-return]


def _norm(folder: Path, weights: Weights, name: str, width: int) -> nn.LayerNorm:
    """ModernBERT's."""
    epsilon = number(folder, read_config(folder), "norm_eps", _DEFAULT_EPSILON)
    has_bias = f"{name}.bias" in weights
    norm = nn.LayerNorm(width, epsilon, bias=has_bias, device="meta")
    parameters = {"weight": weights.get(f"{name}.weight", width)}
    if has_bias:
        parameters["bias"] = weights.get(f"{name}.bias", width)
    norm.load_state_dict(parameters, assign=True)
    return norm


def _pooling(folder: Path, names: _Names) -> Callable[[Tensor, PackedBatch], Tensor]:
    config = read_config(folder)
    if names.reads == "last":
        return partial(_last_before_padding, config.get("pad_token_id"))
    pooling = config.get("classifier_pooling", "cls") if names.reads == "configured" else "cls"
    if pooling not in _POOLINGS:
        raise StartupError(
            f"{folder} has the classifier_pooling {pooling}; known here: {', '.join(_POOLINGS)}"
        )
    return _POOLINGS[pooling]


def _last_before_padding(padding: int | None, hidden: Tensor, packed: PackedBatch) -> Tensor:
    """`[N, hidden]`: the state of each sequence's last token that is not the one `padding`.

    So transformers finds the end of a text, also of one that ends in that token itself.
    """
    starts, stops = packed.cu_seqlens[:-1].long(), packed.cu_seqlens[1:].long()
    places = torch.arange(packed.tokens, device=packed.device)
    if padding is not None:
        places = torch.where(packed.input_ids[0] != padding, places, -1).cummax(0).values
    return hidden[torch.maximum(places[stops - 1], starts)]


def _labels(folder: Path, logits: int) -> tuple[str, ...]:
    """The names of `id2label`, or those that transformers gives."""
    names: Any = read_config(folder).get("id2label")
    names = names if isinstance(names, dict) else {}
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(logits))

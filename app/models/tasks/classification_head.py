"""The heads of transformers' models for sequence classification: from hidden states to logits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from app.errors import StartupError
from app.models.backbone import Backbone
from app.models.batch.packing import PackedBatch
from app.models.checkpoint.config import read_config
from app.models.checkpoint.weights import Weights

_ROBERTA = ("classifier.dense", nn.Tanh, "classifier.out_proj")
# By the type of the model: what reads the pooled state, its activation, and what gives the logits.
_LAYERS: dict[str, tuple[str, Callable[[], nn.Module], str]] = {
    "bert": ("pooler.dense", nn.Tanh, "classifier"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """Logits of `labels` from the state of each sequence's first token."""

    layers: nn.Module
    labels: tuple[str, ...]

    def __call__(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        """`[N, labels]` float32, in packed order, from the states `[T, hidden]`."""
        first = hidden[packed.cu_seqlens[:-1].long()]
        return self.layers(first).float()  # type: ignore[no-any-return]


def require_classifier(folder: Path, weights: Weights) -> None:
    """Raise `StartupError` where the folder holds no model for sequence classification."""
    kind = _kind(folder)
    if f"{_LAYERS[kind][2]}.weight" not in weights:
        raise StartupError(
            f"{folder} holds an embedding model and not a reranker: it has no classification head"
        )


def load_classification_head(
    folder: Path, weights: Weights, backbone: Backbone
) -> ClassificationHead:
    """The head in the model's `folder`, on the backbone's device and in its dtype."""
    dense, activation, last = _LAYERS[_kind(folder)]
    width = backbone.hidden_size
    # BERT's pooler stands beside its layers, behind the name that they have in the checkpoint.
    of_dense = weights.before(f"{dense}.weight")
    logits = weights.tensors[f"{last}.weight"].shape[0]
    layers = (
        of_dense.linear(dense, width, width),
        activation(),
        weights.linear(last, width, logits),
    )
    modules = nn.Sequential(*layers).to(backbone.device, backbone.dtype)
    return ClassificationHead(modules, _labels(folder, logits))


def _kind(folder: Path) -> str:
    kind = read_config(folder).get("model_type")
    if kind not in _LAYERS:
        raise StartupError(
            f"{folder} is no reranker known here, being of type {kind}: use a cross-encoder of "
            f"type {', '.join(_LAYERS)}, or Qwen3-Reranker"
        )
    return str(kind)


def _labels(folder: Path, logits: int) -> tuple[str, ...]:
    """The names of `id2label`, or those that transformers gives."""
    names: Any = read_config(folder).get("id2label")
    names = names if isinstance(names, dict) else {}
    return tuple(str(names.get(str(place), f"LABEL_{place}")) for place in range(logits))

"""Pooling, projections and scaling: the steps from hidden states to the vector of a text.

They are those of sentence-transformers, read from its configuration and compared with it in the
tests. Vectors of whole texts are computed in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from smart_embedder.errors import StartupError
from smart_embedder.kernels.native import RowLinear
from smart_embedder.kernels.packed_batch import End, Indices, PackedBatch, to_device
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.files.config import (
    POOLING_FOLDER,
    PPLX,
    Module,
    read_config,
    read_default_prompt,
    read_integer,
    read_modules,
    read_optional,
    read_poolings,
    read_prompts,
    read_similarity,
    read_transformer_config,
    read_vector_limit,
    require_known_modules,
)
from smart_embedder.models.files.weights import Weights

# The activations of PyTorch that need no arguments.
_ACTIVATIONS = (
    "Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "ELU", "SELU", "CELU", "ReLU6",
    "LeakyReLU", "Mish", "Softplus", "Softsign", "Softshrink", "LogSigmoid", "Tanhshrink",
    "Hardswish", "Hardtanh", "Hardsigmoid", "Hardshrink",
)  # fmt: skip
_TEXT_VECTOR = "sentence_embedding"
# A table of vectors, in place of a transformer and its pooling.
_STATIC = "StaticEmbedding"
# The modules behind the pooling; `Dropout` has no effect but in training.
_STEPS = ("Dense", "LayerNorm", "Normalize", "Dropout", "FlexibleQuantizer")
# The largest number of 8 bits.
_LARGEST_INT8 = 127
# PyTorch's default, which `LayerNorm` of sentence-transformers does not change.
_NORM_EPSILON = 1e-5


def pool(
    hidden: Tensor, packed: PackedBatch, poolings: Sequence[str], sequences: Indices
) -> Tensor:
    """Compute `[S, poolings x hidden]` float32 for the packed indices in `sequences`."""
    chosen = to_device(packed.device, sequences)
    pooled = [_POOLINGS[name](hidden, packed).index_select(0, chosen) for name in poolings]
    return torch.cat(pooled, dim=-1)


def first(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """Return `[N, hidden]`: the state of each sequence's first token, in packed order."""
    return hidden[packed.cu_seqlens[:-1].long()].float()


def last(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """Return `[N, hidden]`: the state of each sequence's last token, in packed order."""
    return hidden[packed.cu_seqlens[1:].long() - 1].float()


def last_before_padding(padding: int | None, hidden: Tensor, packed: PackedBatch) -> Tensor:
    """Return `[N, hidden]`: the state of the last token that is not `padding`, as transformers."""
    starts, stops = packed.cu_seqlens[:-1].long(), packed.cu_seqlens[1:].long()
    positions = torch.arange(packed.tokens, device=packed.device)
    if padding is not None:
        positions = torch.where(packed.input_ids[0] != padding, positions, -1).cummax(0).values
    return hidden[torch.maximum(positions[stops - 1], starts)]


def mean(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """Return `[N, hidden]`: the mean of each sequence's states, in packed order."""
    return _reduce(hidden, packed, "mean")


def _mean_sqrt_length(hidden: Tensor, packed: PackedBatch) -> Tensor:
    return _reduce(hidden, packed, "sum") / _lengths(packed).sqrt()[:, None]


def _weighted_mean(hidden: Tensor, packed: PackedBatch) -> Tensor:
    """Return the mean with weight 1 for the first token, 2 for the second, and so on."""
    offsets = packed.offsets
    ranks = np.arange(1, packed.tokens + 1) - np.repeat(offsets[:-1], np.diff(offsets))
    weights = to_device(packed.device, ranks.astype(np.float32))[:, None]
    lengths = _lengths(packed).float()
    total = lengths * (lengths + 1) / 2
    return _reduce(hidden.float() * weights, packed, "sum") / total[:, None]


def _reduce(states: Tensor, packed: PackedBatch, operation: str) -> Tensor:
    if states.device.type == "mps":  # PyTorch has no `segment_reduce` there.
        return reduce_each_sequence(states, packed, operation)
    # `unsafe` skips checks of the lengths, for which PyTorch would wait for the device.
    return torch.segment_reduce(states.float(), operation, lengths=_lengths(packed), unsafe=True)


def reduce_each_sequence(states: Tensor, packed: PackedBatch, operation: str) -> Tensor:
    """Compute the mean, max or sum of each sequence's states, `[N, hidden]`, one after another."""
    reduce: Callable[..., Tensor] = getattr(torch, {"max": "amax"}.get(operation, operation))
    return torch.stack([reduce(part, 0) for part in torch.split(states.float(), packed.lengths)])


def _lengths(packed: PackedBatch) -> Tensor:
    return packed.cu_seqlens.long().diff()


_POOLINGS: dict[str, Callable[[Tensor, PackedBatch], Tensor]] = {
    "cls": first,
    "last_token": last,
    "max": partial(_reduce, operation="max"),
    "mean": mean,
    "mean_sqrt_length": _mean_sqrt_length,
    "weighted_mean": _weighted_mean,
}
# The poolings that read one token of each sequence.
ENDS: Mapping[str, End] = {"cls": "first", "last_token": "last"}


class VectorLayer(nn.Module):
    """A layer from vectors of `in_features` numbers to vectors of `out_features`.

    With a `residual`, what that computes of a vector is added to the result.
    """

    def __init__(
        self,
        layers: nn.Module,
        in_features: int,
        out_features: int,
        residual: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.layers = layers
        self.residual = residual

    @classmethod
    def read(cls, module: Module) -> "VectorLayer":
        """Read a `Dense` or a `LayerNorm`; raises `StartupError` if it cannot be used."""
        config, weights = read_config(module.folder), Weights.read(module.folder)
        if module.kind == "LayerNorm":
            width = read_integer(module.folder, config, "dimension")
            return cls(weights.norm("norm", width, _NORM_EPSILON), width, width)
        width = read_integer(module.folder, config, "in_features")
        out = read_integer(module.folder, config, "out_features")
        linear = weights.linear("linear", width, out, bias=bool(config.get("bias", True)))
        layers = nn.Sequential(linear, _read_activation(module.folder, config))
        residual: nn.Module | None = None
        if config.get("use_residual"):
            residual = (
                nn.Identity()
                if width == out
                else weights.linear("residual", width, out, bias=False)
            )
        return cls(layers, width, out, residual)

    def require_width(self, width: int) -> int:
        """Return the output width; raises `StartupError` unless the input width is `width`."""
        if self.in_features != width:
            raise StartupError(
                f"a projection takes {self.in_features} numbers, and there are {width}"
            )
        return self.out_features

    def forward(self, states: Tensor) -> Tensor:
        """Compute `[rows, out]` from states `[rows, in]`."""
        projected: Tensor = self.layers(states)
        return projected if self.residual is None else projected + self.residual(states)


def _read_activation(folder: Path, config: dict[str, Any]) -> nn.Module:
    named = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    package, _, activation = named.rpartition(".")
    # Other code that a configuration names is never run.
    if package.split(".")[0] != "torch" or activation not in _ACTIVATIONS:
        raise StartupError(
            f"the projection in {folder} has the activation {activation}; supported: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return getattr(nn, activation)()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class DimensionTruncation:
    """Keeps the first `width` numbers of a vector, without scaling them again."""

    width: int

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return `[rows, width]`."""
        return vectors[:, : self.width]


def normalize(vectors: Tensor) -> Tensor:
    """Scale each vector to unit length."""
    return functional.normalize(vectors, dim=-1)


def quantize_tanh(vectors: Tensor) -> Tensor:
    """Compute the whole numbers, from -127 to 127, that pplx-embed makes of a vector."""
    return torch.round(torch.tanh(vectors) * _LARGEST_INT8)


def describe_layers(module: nn.Module) -> str:
    """Describe the layers of a module for the id of a vector space: their classes and epsilons.

    Linear layers are left out: they have several implementations with the same results.
    """
    layers = [layer for layer in module.modules() if not list(layer.children())]
    return " ".join(
        f"{type(layer).__name__} {getattr(layer, 'eps', '')}".strip()
        for layer in layers
        if not isinstance(layer, nn.Linear | RowLinear)
    )


# From vectors to vectors, `[rows, ...]`.
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """A configuration of sentence-transformers: the steps from states to vectors, and the prompts.

    `poolings` come before `steps`, and are empty if the configuration names none. `default_prompt`
    is read before each text of a request that names no prompt. `similarity` compares two vectors.
    """

    poolings: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    similarity: str = "cosine"

    @classmethod
    def read(cls, folder: Path, *, result: str = _TEXT_VECTOR) -> "SentenceConfig":
        """Read the configuration of a model whose last module makes a `result`.

        Raises `StartupError` for unknown modules and invalid values.
        """
        modules, pooling = read_modules(folder), folder / POOLING_FOLDER
        require_known_modules(folder, "Transformer", _STATIC, "Pooling", *_STEPS)
        if not modules and (pooling / "config.json").is_file():
            modules = [Module("Pooling", pooling)]
        _require_order(folder, [module.kind for module in modules])
        poolings: tuple[str, ...] = ()
        steps: list[Step] = []
        last = next((module for module in reversed(modules) if module.kind != "Dropout"), None)
        for module in modules:
            if module.kind == "Pooling":
                poolings = read_poolings(module.folder)
            elif module.kind in _STEPS:
                require_vector(module.folder, last=result if module is last else None)
                match module.kind:
                    case "Normalize":
                        steps.append(normalize)
                    case "FlexibleQuantizer":
                        _require_pplx(folder)
                        steps.append(quantize_tanh)
                    case "Dense" | "LayerNorm":
                        steps.append(VectorLayer.read(module))
        width = read_vector_limit(folder, "truncate_dim")
        if width is not None:
            steps.append(DimensionTruncation(width))
        prompts, default = read_prompts(folder), read_default_prompt(folder)
        return cls(poolings, tuple(steps), prompts, default, read_similarity(folder))


def place_steps(config: SentenceConfig, backbone: Backbone) -> int:
    """Move the layers behind the pooling to the device, and return the width of the vectors."""
    width = backbone.hidden_size * len(config.poolings)
    for step in config.steps:
        if isinstance(step, VectorLayer):
            backbone.place_head(step, torch.float32)
            width = step.require_width(width)
        elif isinstance(step, DimensionTruncation):
            width = min(width, step.width)
    return width


def _require_pplx(folder: Path) -> None:
    """Raise `StartupError` for the quantizer of another model, whose code may be another."""
    if read_transformer_config(folder).get("architectures") != PPLX:
        raise StartupError(
            f"{folder / 'modules.json'} names FlexibleQuantizer, which is computed for pplx-embed "
            "alone: code of a checkpoint is never run"
        )


def _require_order(folder: Path, kinds: list[str]) -> None:
    """Raise `StartupError` unless one transformer is first, and one pooling before all steps."""
    behind = [kind for kind in kinds if kind != "Dropout"][1:]
    has_several = any(kinds.count(kind) > 1 for kind in ("Transformer", _STATIC, "Pooling"))
    follows = not behind or {"Transformer", _STATIC}.isdisjoint(behind)
    is_pooled_twice = _STATIC in kinds and "Pooling" in kinds
    if has_several or not follows or is_pooled_twice or "Pooling" in behind[1:]:
        raise StartupError(
            f"{folder / 'modules.json'} has its modules in the order {', '.join(kinds)}; "
            "supported: Transformer, Pooling, and then others"
        )


def require_vector(folder: Path, known: str = _TEXT_VECTOR, *, last: str | None = None) -> None:
    """Raise `StartupError` if a module reads another feature than `known`, or does not write it.

    With `last`, it must write that instead.
    """
    config = read_optional(folder / "config.json")
    for side, expected in (("input", known), ("output", last or known)):
        named = config.get(f"module_{side}_name") or known
        if named != expected:
            raise StartupError(f"{folder} works on {named}; supported here: {expected}")


def load_token_projection(folder: Path, weights: Weights, width: int) -> tuple[nn.Module, int]:
    """Load the layers from a token's state to its ColBERT vector, and return its width, too."""
    modules = [module for module in read_modules(folder) if module.kind == "Dense"]
    if not modules and "linear.weight" in weights:
        # Stanford's ColBERT keeps one layer among the weights of the transformer.
        linear = weights.linear("linear", width, None, bias=False)
        return linear, linear.out_features
    if not modules:
        raise StartupError(f"{folder} has no projection of its tokens' states")
    layers = [VectorLayer.read(module) for module in modules]
    for layer in layers:
        width = layer.require_width(width)
    return nn.Sequential(*layers), width

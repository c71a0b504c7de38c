"""SPLADE: lexical weights over the whole vocabulary, from the head of a masked language model.

Source: "SPLADE v2" (Formal et al. 2021), as sentence-transformers' `SpladePooling` computes it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from smart_embedder.errors import InferenceError, StartupError
from smart_embedder.hardware.transfer import not_finite_error
from smart_embedder.kernels.backend import ACTIVATIONS, Linear, make_linear
from smart_embedder.kernels.packed_batch import PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.backbone import Backbone, preemption_point
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.config import (
    MASKED_LANGUAGE,
    TextOptions,
    number,
    read_config,
    read_default_prompt,
    read_prompts,
    read_vector_limit,
    require_known_modules,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.embedder import EmbeddingModel
from smart_embedder.models.runner import Made
from smart_embedder.requests import Outputs
from smart_embedder.results import SparseVector, TextEmbedding
from smart_embedder.tokens import TokenIds


@dataclass(frozen=True, slots=True)
class _Names:
    """The parameters of a family's head, and where `config.json` says its activation and epsilon.

    Where it has no name for them they are the usual ones. The weight of `decoder` is left out of a
    file where it is that of `tokens`, the table that tokens are looked up in. Its bias may be
    `bias` instead. Of most families it always has one.
    """

    dense: str
    norm: str
    decoder: str
    activation: str | None = None
    epsilon: str | None = "layer_norm_eps"
    bias: str = ""
    tokens: str = "embeddings.word_embeddings"
    has_bias: str | None = None


_BERT = "cls.predictions"
_ROBERTA = _Names("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", bias="lm_head.bias")
# By the type of the model.
_NAMES = {
    "bert": _Names(
        f"{_BERT}.transform.dense",
        f"{_BERT}.transform.LayerNorm",
        f"{_BERT}.decoder",
        "hidden_act",
        bias=f"{_BERT}.bias",
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": _ROBERTA,
    "distilbert": _Names(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", "activation", epsilon=None
    ),
    "modernbert": _Names(
        "head.dense",
        "head.norm",
        "decoder",
        "classifier_activation",
        "norm_eps",
        tokens="embeddings.tok_embeddings",
        has_bias="decoder_bias",
    ),
}
_DEFAULT_EPSILON = 1e-12
# Logits held at once: 64 MiB of them in float32, whatever the batch.
_MOST_LOGITS = 2**24
_POOLINGS = ("max", "sum")
# How often the logarithm is taken, by the name of `SpladePooling`'s activation.
_LOGARITHMS = {"relu": 1, "log1p_relu": 2}


@dataclass(frozen=True, slots=True)
class SpladePooling:
    """The weight of each token of the vocabulary: the `max` or the `sum` over a text's tokens.

    Of a logit x each of those is log(1 + relu(x)), or that function taken twice. Only the `most`
    largest weights are kept, if it is set.
    """

    sums: bool
    logarithms: int
    most: int | None = None

    @classmethod
    def read(cls, folder: Path, most: int | None = None) -> "SpladePooling":
        """From the module's configuration; raises `StartupError` for what is not known here."""
        config = read_config(folder)
        pooling = config.get("pooling_strategy", "max")
        activation = config.get("activation_function", "relu")
        if pooling not in _POOLINGS or activation not in _LOGARITHMS:
            raise StartupError(
                f"{folder / 'config.json'} has the pooling {pooling} of {activation}; known here: "
                f"{' and '.join(_POOLINGS)} of {' and '.join(_LOGARITHMS)}"
            )
        return cls(pooling == "sum", _LOGARITHMS[activation], most)

    def reduce(self, logits: Tensor) -> Tensor:
        """`[vocabulary]` float32 of some tokens' logits `[rows, vocabulary]`."""
        # The function only rises, so that of the highest logit is the highest.
        return self._weights(logits.float()).sum(0) if self.sums else logits.amax(0).float()

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """What `reduce` gives for the tokens of both."""
        return first + second if self.sums else torch.maximum(first, second)

    def finish(self, reduced: Tensor) -> Tensor:
        """The weights, of whole texts."""
        weights = reduced if self.sums else self._weights(reduced)
        if self.most is None or self.most >= len(weights):
            return weights
        kept = weights.topk(self.most).indices
        return torch.zeros_like(weights).index_copy_(0, kept, weights[kept])

    def _weights(self, logits: Tensor) -> Tensor:
        weights = logits.relu()
        for _ in range(self.logarithms):
            weights = weights.log1p_()
        return weights


class SpladeEmbedder(EmbeddingModel):
    """Implements `smart_embedder.interface.Embedder` for sparse vectors alone."""

    kinds = Outputs(sparse=True)
    pooling = "splade"
    normalizes = False

    def __init__(
        self, name: str, folder: Path, max_length: int, target: Target, *, pooling: Path
    ) -> None:
        """Load it, with the `SpladePooling` in the folder `pooling`; raises `StartupError`."""
        require_known_modules(folder, "Transformer", "MLMTransformer", "SpladePooling")
        weights, texts = Weights.read(folder), TextOptions.read(folder, MASKED_LANGUAGE)
        backbone, tokenizer = load_backbone(folder, target, max_length, texts, weights=weights)
        self._head, self._vocabulary = load_masked_language_head(folder, weights, backbone)
        self._splade = SpladePooling.read(pooling, read_vector_limit(folder, "max_active_dims"))
        prompts, default = read_prompts(folder), read_default_prompt(folder)
        super().__init__(name, backbone, tokenizer, prompts, default)
        how = self._splade
        how_pooled = f"{'sum' if how.sums else 'max'}_log{how.logarithms}"
        if how.most is not None:
            how_pooled = f"{how_pooled}_{how.most}"
        self._made = {"sparse": Made(how_pooled, self._vocabulary)}

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`.

        It waits for the device: how many weights there are decides the size of the result.
        """
        packed = self._backbone.pack(sequences)
        hidden = self._backbone.forward(packed)
        results: list[TextEmbedding | InferenceError] = [TextEmbedding()] * len(sequences)
        wanted = [index for index, each in enumerate(outputs) if each.sparse]
        for index, weights in self._pool(hidden, packed, wanted):
            results[index] = _embedding(weights)
        return lambda: results

    def _pool(
        self, hidden: Tensor, packed: PackedBatch, wanted: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """The weights `[vocabulary]` of wanted sequences, as packed, a bounded slice at a time."""
        order = packed.unpack_order
        rows_at_once = max(1, _MOST_LOGITS // self._vocabulary)
        for run in _runs(sorted(wanted, key=lambda index: order[index]), packed, rows_at_once):
            states = hidden[packed.offsets[order[run[0]]] : packed.offsets[order[run[-1]] + 1]]
            if len(run) == 1:
                slices = map(self._logits, torch.split(states, rows_at_once))
                reduced = reduce(self._splade.join, map(self._splade.reduce, slices))
                yield run[0], self._splade.finish(reduced)
            else:
                lengths = [packed.lengths[order[index]] for index in run]
                parts = torch.split(self._logits(states), lengths)
                weights = (self._splade.finish(self._splade.reduce(part)) for part in parts)
                yield from zip(run, weights, strict=True)

    def _logits(self, states: Tensor) -> Tensor:
        preemption_point()
        return self._head(states)


def _runs(wanted: list[int], packed: PackedBatch, most: int) -> Iterator[list[int]]:
    """Neighbours of together at most `most` tokens; a longer sequence is alone."""
    run: list[int] = []
    tokens = 0
    for index in wanted:
        position = packed.unpack_order[index]
        length = packed.lengths[position]
        beside = bool(run) and position == packed.unpack_order[run[-1]] + 1
        if run and not (beside and tokens + length <= most):
            yield run
            run, tokens = [], 0
        run.append(index)
        tokens += length
    if run:
        yield run


def _embedding(weights: Tensor) -> TextEmbedding | InferenceError:
    """A sum is not finite as soon as one number is not."""
    indices = weights.nonzero().squeeze(1)
    values = weights[indices].cpu()
    if not bool(weights.sum().isfinite()):
        return not_finite_error()
    return TextEmbedding(sparse=SparseVector(indices.cpu().numpy(), values.numpy()))


def load_masked_language_head(
    folder: Path, weights: Weights, backbone: Backbone
) -> tuple[Linear, int]:
    """The head in the model's `folder`; raises `StartupError` where none is known.

    It makes of states `[rows, hidden]` their logits `[rows, vocabulary]`, in their dtype. With it
    comes the size of the vocabulary.
    """
    config = read_config(folder)
    kind = config.get("model_type")
    names = _NAMES.get(str(kind))
    if names is None:
        raise StartupError(
            f"{folder} holds a masked language model of type {kind}; known here: "
            f"{', '.join(_NAMES)}"
        )
    if f"{names.dense}.weight" not in weights:
        raise StartupError(f"{folder} lacks the head of a masked language model: {names.dense}")
    device, dtype, backend = backbone.device, backbone.dtype, backbone.backend
    table = f"{names.decoder}.weight"
    if table not in weights:
        if config.get("tie_word_embeddings") is False:
            raise StartupError(f"the checkpoint in {folder} lacks the tensor {table}")
        table = f"{names.tokens}.weight"
    decoder, bias = weights.before(table), None
    weight = decoder.get(table, *decoder.tensors[decoder.prefix + table].shape)
    if names.has_bias is None or config.get(names.has_bias, True):
        bias_name = f"{names.decoder}.bias"
        if names.bias in weights and bias_name not in weights:
            bias_name = names.bias
        bias = weights.get(bias_name, len(weight))
    to_logits = make_linear(weight, bias)
    epsilon = _DEFAULT_EPSILON
    if names.epsilon is not None:
        epsilon = number(folder, config, names.epsilon, _DEFAULT_EPSILON)
    # The table has as many columns as a token's embedding, and the head's states.
    width = to_logits.in_features
    has_bias = f"{names.dense}.bias" in weights
    dense = weights.linear(names.dense, backbone.hidden_size, width, bias=has_bias)
    activation = "gelu" if names.activation is None else config.get(names.activation, "gelu")
    if activation not in ACTIVATIONS:
        raise StartupError(f"{folder} has the activation {activation}, which is not known here")
    to_transformed = backend.linear([dense.to(device, dtype)], str(activation))
    # PyTorch takes parameters that are more exact than the states on a CPU alone.
    exact = torch.float32 if device.type == "cpu" else dtype
    norm = weights.norm(names.norm, width, epsilon).to(device, exact)
    placed = backbone.place_head(to_logits)
    return lambda states: placed(norm(to_transformed(states))), len(weight)

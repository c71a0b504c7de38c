"""SPLADE: lexical weights over the whole vocabulary, from the head of a masked language model.

Source: "SPLADE v2" (Formal et al. 2021), as sentence-transformers' `SpladePooling` computes it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from smart_embedder.errors import InferenceError, StartupError
from smart_embedder.hardware.transfer import not_finite_error
from smart_embedder.kernels.backend import ACTIVATIONS, Linear, make_linear
from smart_embedder.kernels.packed_batch import TOKEN_ID, PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.backbone import Backbone, preemption_point
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.config import (
    MASKED_LANGUAGE,
    TRANSFORMERS,
    TextOptions,
    read_config,
    read_default_prompt,
    read_number,
    read_optional,
    read_prompts,
    read_query_module,
    read_vector_limit,
    require_known_modules,
    transformer_folder,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.embedder import EmbeddingModel
from smart_embedder.models.heads.static import StaticTokenizer
from smart_embedder.models.runner import OutputSpec
from smart_embedder.requests import CUT_AT_END, InputType, Outputs, TruncationOptions
from smart_embedder.results import FloatArray, SparseVector, TextEmbedding
from smart_embedder.tokens import TokenIds, TokenizedText


@dataclass(frozen=True, slots=True)
class _HeadNames:
    """The names of a head's layers, and of its activation and epsilon in `config.json`.

    Without a name, `activation` and `epsilon` have their defaults. A file may leave out the weight
    of `decoder` if it is that of `tokens`, the embeddings of tokens. The bias of `decoder` may be
    stored as `bias`; it exists unless the option `has_bias` is false.
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
_ROBERTA = _HeadNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", bias="lm_head.bias")
_NAMES_BY_TYPE = {
    "bert": _HeadNames(
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
    "distilbert": _HeadNames(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", "activation", epsilon=None
    ),
    "modernbert": _HeadNames(
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
# A mark of the tokens of queries that are weighed without a forward.
_STATIC = 1 << 31
# The most logits in memory at once: 64 MiB in float32, whatever the batch.
_MOST_LOGITS = 2**24
_POOLINGS = ("max", "sum")
# How many times the logarithm is taken, by the activation of `SpladePooling`.
_LOGARITHMS = {"relu": 1, "log1p_relu": 2}


@dataclass(frozen=True, slots=True)
class SpladePooling:
    """Computes the weights of a text: for each token of the vocabulary, a max or sum over the text.

    A logit x weighs log(1 + relu(x)); with two `logarithms` that function is applied twice. If
    `max_active` is set, only that many of the largest weights are kept.
    """

    sums: bool
    logarithms: int
    max_active: int | None = None

    @classmethod
    def read(cls, folder: Path, max_active: int | None = None) -> "SpladePooling":
        """Read the module's configuration; raises `StartupError` if it is not supported."""
        config = read_config(folder)
        pooling = config.get("pooling_strategy", "max")
        activation = config.get("activation_function", "relu")
        if pooling not in _POOLINGS or str(activation) not in _LOGARITHMS:
            raise StartupError(
                f"{folder / 'config.json'} has the pooling {pooling} of {activation}; supported: "
                f"{' and '.join(_POOLINGS)} of {' and '.join(_LOGARITHMS)}"
            )
        return cls(pooling == "sum", _LOGARITHMS[activation], max_active)

    def reduce(self, logits: Tensor) -> Tensor:
        """Reduce the logits `[rows, vocabulary]` of some tokens to `[vocabulary]` float32."""
        # The weight grows with the logit, so the maximum can be taken of the logits.
        return self._weights(logits.float()).sum(0) if self.sums else logits.amax(0).float()

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """Join the results of `reduce` for two parts of a text."""
        return first + second if self.sums else torch.maximum(first, second)

    def finish(self, reduced: Tensor) -> Tensor:
        """Compute the weights of a text from the joined results of `reduce`."""
        weights = reduced if self.sums else self._weights(reduced)
        if self.max_active is None or self.max_active >= len(weights):
            return weights
        kept = weights.topk(self.max_active).indices
        return torch.zeros_like(weights).index_copy_(0, kept, weights[kept])

    def _weights(self, logits: Tensor) -> Tensor:
        weights = logits.relu()
        for _ in range(self.logarithms):
            weights = weights.log1p_()
        return weights


@dataclass(frozen=True, slots=True)
class StaticQueries:
    """Weighs each token of a query by its entry of `weights` `[vocabulary]`, without a forward.

    Source: `SparseStaticEmbedding` of sentence-transformers, as in OpenSearch's models.
    """

    tokenizer: StaticTokenizer
    weights: FloatArray
    max_active: int | None

    @classmethod
    def read(cls, folder: Path, max_length: int, max_active: int | None) -> "StaticQueries":
        """Read weights and tokenizer; raises `StartupError` if they cannot be used."""
        if read_optional(folder / "config.json").get("path"):
            raise StartupError(
                f"{folder} reads the weights of queries from a JSON file, which is not supported: "
                "save the model again with sentence-transformers"
            )
        stored = Weights.read(folder)
        weights = stored.get("weight", None, dtype=torch.float32).numpy()
        limit = TextOptions.read(folder, MASKED_LANGUAGE).max_length or max_length
        tokenizer = StaticTokenizer.from_folder(folder, min(max_length, limit))
        if tokenizer.vocabulary_size > len(weights):
            raise StartupError(
                f"the tokenizer in {folder} has {tokenizer.vocabulary_size} tokens, and there are "
                f"weights for {len(weights)}: they are not of one model"
            )
        tokenizer.nothing = len(weights)
        return cls(tokenizer, weights, max_active)

    def tokenize(
        self, texts: list[str], prompt: str, truncation: TruncationOptions
    ) -> list[TokenizedText]:
        """Tokenize queries, and mark their tokens."""
        tokenized = self.tokenizer.encode(texts, prompt, truncation)
        return [replace(text, ids=text.ids | _STATIC) for text in tokenized]

    def embed(self, ids: TokenIds) -> TextEmbedding:
        """Compute the weights of a query's tokens."""
        indices = np.unique(ids & TOKEN_ID)
        indices = indices[indices < len(self.weights)]
        values = self.weights[indices]
        if self.max_active is not None:
            kept = np.argsort(-np.abs(values), kind="stable")[: self.max_active]
            indices, values = indices[np.sort(kept)], values[np.sort(kept)]
        is_weighed = values != 0
        return TextEmbedding(sparse=SparseVector(indices[is_weighed], values[is_weighed]))


class SpladeEmbedder(EmbeddingModel):
    """Implements `smart_embedder.interface.Embedder` for sparse vectors only."""

    kinds = Outputs(sparse=True)
    pooling = "splade"
    normalizes = False

    def __init__(
        self, name: str, folder: Path, max_length: int, target: Target, *, pooling: Path
    ) -> None:
        """Load the model, and the `SpladePooling` in `pooling`; raises `StartupError`."""
        require_known_modules(folder, *TRANSFORMERS, "SpladePooling")
        transformer = transformer_folder(folder)
        weights, texts = Weights.read(transformer), TextOptions.read(transformer, MASKED_LANGUAGE)
        backbone, tokenizer = load_backbone(transformer, target, max_length, texts, weights=weights)
        self._head, self._vocabulary = load_masked_language_head(transformer, weights, backbone)
        max_active = read_vector_limit(folder, "max_active_dims")
        self._splade = SpladePooling.read(pooling, max_active)
        self._queries: StaticQueries | None = None
        if (module := read_query_module(folder)) is not None:
            self._queries = StaticQueries.read(module.folder, max_length, max_active)
            self.reads_input_type = True
        prompts, default = read_prompts(folder), read_default_prompt(folder)
        super().__init__(name, backbone, tokenizer, prompts, default)
        described = f"{'sum' if self._splade.sums else 'max'}_log{self._splade.logarithms}"
        if self._splade.max_active is not None:
            described = f"{described}_{self._splade.max_active}"
        reading = None
        if self._queries is not None:
            reading = ("static queries", self._queries.tokenizer.digest, self._prompts_read)
        self._output_specs = {"sparse": OutputSpec(described, self._vocabulary, reading=reading)}

    def tokenize(
        self,
        texts: list[str],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        """Tokenize documents, which are the default, or queries."""
        if self._queries is not None and input_type == "query":
            return self._queries.tokenize(texts, prompt, truncation)
        return super().tokenize(texts, prompt, truncation)

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`; waits for the device, which decides the size of the results."""
        results: list[TextEmbedding | InferenceError] = [TextEmbedding()] * len(sequences)
        computed: list[int] = []
        for index, (ids, kinds) in enumerate(zip(sequences, outputs, strict=True)):
            if self._queries is None or not ids[0] & _STATIC:
                computed.append(index)
            elif kinds.sparse:
                results[index] = self._queries.embed(ids)
        if computed:
            packed = self._backbone.pack([sequences[index] for index in computed])
            hidden = self._backbone.forward(packed)
            requested = [place for place, index in enumerate(computed) if outputs[index].sparse]
            for place, weights in self._pool(hidden, packed, requested):
                results[computed[place]] = _make_embedding(weights)
        return lambda: results

    def _pool(
        self, hidden: Tensor, packed: PackedBatch, requested: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the weights `[vocabulary]` of each sequence, in packed order, in bounded memory."""
        order = packed.unpack_order
        rows_at_once = max(1, _MOST_LOGITS // self._vocabulary)
        in_order = sorted(requested, key=lambda index: order[index])
        for run in _group_neighbours(in_order, packed, rows_at_once):
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


def _group_neighbours(
    in_order: list[int], packed: PackedBatch, max_tokens: int
) -> Iterator[list[int]]:
    """Group neighbours that have together at most `max_tokens`; a longer sequence is alone."""
    run: list[int] = []
    tokens = 0
    for index in in_order:
        position = packed.unpack_order[index]
        length = packed.lengths[position]
        is_neighbour = bool(run) and position == packed.unpack_order[run[-1]] + 1
        if run and not (is_neighbour and tokens + length <= max_tokens):
            yield run
            run, tokens = [], 0
        run.append(index)
        tokens += length
    if run:
        yield run


def _make_embedding(weights: Tensor) -> TextEmbedding | InferenceError:
    """Convert the weights `[vocabulary]` of a text; an error if one of them is not finite."""
    indices = weights.nonzero().squeeze(1)
    values = weights[indices].cpu()
    # A sum is not finite as soon as one number is not.
    if not bool(weights.sum().isfinite()):
        return not_finite_error()
    return TextEmbedding(sparse=SparseVector(indices.cpu().numpy(), values.numpy()))


def load_masked_language_head(
    folder: Path, weights: Weights, backbone: Backbone
) -> tuple[Linear, int]:
    """Load the head of a masked language model, and return the size of its vocabulary, too.

    The head computes from states `[rows, hidden]` logits `[rows, vocabulary]` of the same dtype.
    Raises `StartupError` if `folder` has no head that is supported.
    """
    config = read_config(folder)
    kind = config.get("model_type")
    names = _NAMES_BY_TYPE.get(str(kind))
    if names is None:
        raise StartupError(
            f"{folder} holds a masked language model of type {kind}; supported: "
            f"{', '.join(_NAMES_BY_TYPE)}"
        )
    if f"{names.dense}.weight" not in weights:
        raise StartupError(f"{folder} lacks the head of a masked language model: {names.dense}")
    device, dtype, backend = backbone.device, backbone.dtype, backbone.backend
    table = f"{names.decoder}.weight"
    if table not in weights:
        if config.get("tie_word_embeddings") is False:
            raise StartupError(f"the checkpoint in {folder} lacks the tensor {table}")
        table = f"{names.tokens}.weight"
    decoder, bias = weights.with_prefix_of(table), None
    weight = decoder.get(table, *decoder.tensors[decoder.prefix + table].shape)
    if names.has_bias is None or config.get(names.has_bias, True):
        bias_name = f"{names.decoder}.bias"
        if names.bias in weights and bias_name not in weights:
            bias_name = names.bias
        bias = weights.get(bias_name, len(weight))
    to_logits = make_linear(weight, bias)
    epsilon = _DEFAULT_EPSILON
    if names.epsilon is not None:
        epsilon = read_number(folder, config, names.epsilon, _DEFAULT_EPSILON)
    # The width of a token's embedding, and of the states within the head.
    width = to_logits.in_features
    has_bias = f"{names.dense}.bias" in weights
    dense = weights.linear(names.dense, backbone.hidden_size, width, bias=has_bias)
    activation = "gelu" if names.activation is None else config.get(names.activation, "gelu")
    if activation not in ACTIVATIONS:
        raise StartupError(f"{folder} has the activation {activation}, which is not supported")
    to_transformed = backend.linear([dense.to(device, dtype)], str(activation))
    # Only on a CPU PyTorch takes parameters of a wider format than the states.
    exact = torch.float32 if device.type == "cpu" else dtype
    norm = weights.norm(names.norm, width, epsilon).to(device, exact)
    placed = backbone.place_head(to_logits)
    return lambda states: placed(norm(to_transformed(states))), len(weight)

"""Cross-encoders: classifiers of a query and a passage, with one logit or several labels.

Pairs have the layout of the tokenizer's own template, and are cut as by `FlagReranker` of
FlagEmbedding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from smart_embedder.errors import StartupError
from smart_embedder.kernels.packed_batch import SECOND_SEGMENT, End, PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.chat_template import ChatTemplate
from smart_embedder.models.files.config import (
    CLASSES,
    STATES,
    TRANSFORMERS,
    TextOptions,
    read_config,
    read_default_prompt,
    read_modules,
    read_number,
    read_optional,
    read_poolings,
    require_known_modules,
    transformer_folder,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.pooling import (
    ENDS,
    VectorLayer,
    describe_layers,
    first,
    mean,
    pool,
    require_vector,
)
from smart_embedder.models.rerankers.templates import PairPrompt, Template, read_chat_template
from smart_embedder.models.runner import OutputSpec, RerankingModel
from smart_embedder.models.tokenizer import NO_IDS, TextTokenizer
from smart_embedder.requests import CUT_AT_END, TruncationOptions
from smart_embedder.results import FloatArray
from smart_embedder.tokens import JoinedIds, TokenizedPair
from smart_embedder.vector_space import SCORE

Pool = Callable[[Tensor, PackedBatch], Tensor]


@dataclass(frozen=True, slots=True)
class _HeadNames:
    """The names of a head's layers, and the activation after the dense layer.

    `activation` is a module, or the name of the option in `config.json`. A head without a dense
    layer has no bias. `reads` is the token that it reads, or `configured` by the configuration.
    """

    dense: str | None = None
    activation: Callable[[], nn.Module] | str = nn.Identity
    logits: str = "classifier"
    norm: str | None = None
    reads: Literal["first", "last", "configured"] = "first"


_ROBERTA = _HeadNames("classifier.dense", nn.Tanh, "classifier.out_proj")
_NAMES_BY_TYPE = {
    "bert": _HeadNames("pooler.dense", nn.Tanh),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": _ROBERTA,
    "distilbert": _HeadNames("pre_classifier", nn.ReLU),
    "qwen3": _HeadNames(logits="score", reads="last"),
    "modernbert": _HeadNames(
        "head.dense", "classifier_activation", norm="head.norm", reads="configured"
    ),
}
_POOLINGS = {"cls": first, "mean": mean}
# Classes of tokenizers that mark the two texts of a pair by default.
_SEGMENT_TOKENIZERS = {
    "BertTokenizer", "CanineTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer",
    "ElectraTokenizer", "FNetTokenizer", "MobileBertTokenizer",
}  # fmt: skip
# The modules of sentence-transformers from a pooled vector to scores, and their last output.
_STEPS = ("Dense", "LayerNorm", "Dropout")
_SCORES = "scores"
# The types that are computed as by FlagReranker, which leaves out an empty passage.
_FLAG_TYPES = ("xlm-roberta", "roberta")


@dataclass(frozen=True, slots=True)
class _Scorer:
    """A transformer, and a head that computes logits `[N, labels]` of its states.

    `pool` computes a vector of each sequence, whose name is in vector space ids, and `layers` its
    logits. `end` is the token that `pool` reads; None if it reads several.
    """

    backbone: Backbone
    tokenizer: TextTokenizer
    pool: Pool
    pooling: str
    layers: nn.Module
    end: End | None
    labels: int


class _PairLayout:
    """Pairs as in the tokenizer's own template, whose tokens `marks` may give a segment.

    With `drops_empty` only the query is read if the passage is empty.
    """

    def __init__(self, tokenizer: TextTokenizer, *, marks: bool, drops_empty: bool) -> None:
        self._tokenizer, self._drops_empty = tokenizer, drops_empty
        self._prefix, self._middle, self._suffix = tokenizer.pair_template()
        segments = tokenizer.pair_segments() if marks else [0] * 5
        self._marks = [SECOND_SEGMENT * segment for segment in segments]

    @property
    def described(self) -> list[object]:
        """The layout, for the id of a vector space."""
        reading: list[object] = [ids.tolist() for ids in (self._prefix, self._middle, self._suffix)]
        return [*reading, any(self._marks), self._drops_empty]

    def fill(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Cut the query to three quarters of the limit and each passage to the rest."""
        del instruction
        max_length, marks = self._tokenizer.max_length, self._marks
        (query_tokens,) = self._tokenizer.encode_plain([query], max_length * 3 // 4)
        special_count = len(self._prefix) + len(self._middle) + len(self._suffix)
        limit = max_length - special_count - query_tokens.kept
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens)
        head = np.concatenate((self._prefix | marks[0], query_tokens.ids | marks[1]))
        pairs: list[TokenizedPair] = []
        for text in self._tokenizer.encode_plain(passages, max(0, limit), truncation.side):
            middle = self._middle if text.total or not self._drops_empty else NO_IDS
            end = np.concatenate((middle | marks[2], text.ids | marks[3], self._suffix | marks[4]))
            if not len(head) + len(end):  # A forward needs at least one token.
                end = np.zeros(1, np.int64)
            pairs.append(
                TokenizedPair(
                    sequence=JoinedIds(head, end),
                    query_tokens=query_tokens.total,
                    query_kept=query_tokens.kept,
                    passage_tokens=text.total,
                    passage_kept=text.kept,
                    query_exact=query_tokens.exact,
                    passage_exact=text.exact,
                )
            )
        return pairs


def _read_template(folder: Path, transformer: Path) -> Template | None:
    """Read the chat template with which sentence-transformers would read pairs, if it would."""
    if not read_modules(folder):
        if ChatTemplate.read(transformer) is None:
            return None
        return read_chat_template(folder, TextOptions())
    is_modular = any(module.kind == "Pooling" for module in read_modules(folder))
    texts = TextOptions.read(transformer, STATES if is_modular else CLASSES)
    return None if texts.message_format is None else read_chat_template(folder, texts)


class CrossEncoder(RerankingModel):
    """Implements `smart_embedder.interface.Reranker`.

    A score is the raw logit. With several labels it is the log odds of the label `kind`, whose
    sigmoid is the probability of that label.
    """

    always_normalizes = False
    reads_instruction = False

    def __init__(
        self, name: str, folder: Path, max_length: int, target: Target, kind: str | None = None
    ) -> None:
        """Load the model; raises `StartupError` if the folder holds no cross-encoder."""
        transformer = transformer_folder(folder)
        config = read_config(transformer)
        tokenizer_config = read_optional(transformer / "tokenizer_config.json")
        template = _read_template(folder, transformer)
        if template is None:
            require_default_prompt(folder, "")
        # The tokenizer of transformers may mark each token with the text of the pair it belongs to.
        inputs = tokenizer_config.get("model_input_names")
        tokenizer_class = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
        segments = tokenizer_class is None
        segments = segments or str(tokenizer_class).removesuffix("Fast") in _SEGMENT_TOKENIZERS
        if isinstance(inputs, list):
            segments = "token_type_ids" in inputs
        is_modular = any(module.kind == "Pooling" for module in read_modules(folder))
        if not is_modular:
            require_known_modules(folder, *TRANSFORMERS)
        if is_modular:
            scorer = _load_modules(folder, transformer, max_length, target)
        elif config.get("model_type") in _NAMES_BY_TYPE:
            scorer = _load_own_head(transformer, max_length, target)
        else:
            scorer = _load_classifier(transformer, max_length, target, marks_segments=segments)
        super().__init__(name, scorer.backbone, scorer.tokenizer)
        self._layers, self._pool, self._end = scorer.layers, scorer.pool, scorer.end
        self.labels = _name_labels(config, scorer.labels)
        self._ranking_label = _find_label(name, self.labels, kind)
        self._several = config.get("problem_type") == "multi_label_classification"
        tokenizer = scorer.tokenizer
        reading: object
        if template is None:
            segments = segments and scorer.backbone.reads_segments
            # With an empty passage FlagReranker reads only the query.
            drops_empty = config.get("model_type") in _FLAG_TYPES and scorer.labels == 1
            layout = _PairLayout(tokenizer, marks=segments, drops_empty=drops_empty)
            self._fill, reading = layout.fill, layout.described
        else:
            self._fill, reading = PairPrompt(template, tokenizer).fill, repr(template)
            self.reads_instruction = bool(template.instructed)
        steps = f"{self._ranking_label} {describe_layers(self._layers)}"
        self._output_specs = {
            SCORE: OutputSpec(scorer.pooling, scorer.labels, steps=steps, reading=reading)
        }

    def _logits(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        return self._layers(self._pool(hidden, packed)).float()  # type: ignore[no-any-return]

    def _relevance(self, logits: FloatArray) -> npt.NDArray[np.floating[Any]]:
        if len(self.labels) == 1 or self._several:
            return logits[:, self._ranking_label]
        # In PyTorch, because NumPy warns of numbers that are not finite.
        exact = torch.from_numpy(logits).double()
        relevant = exact[:, self._ranking_label].clone()
        exact[:, self._ranking_label] = -torch.inf
        return (relevant - exact.logsumexp(dim=1)).numpy()


def require_default_prompt(folder: Path, *supported: str) -> None:
    """Raise `StartupError` if sentence-transformers would put another prompt before each pair."""
    if read_modules(folder) and (prompt := read_default_prompt(folder)) not in supported:
        raise StartupError(
            f"{folder} has the prompt {prompt!r:.60} for every pair (default_prompt_name), which "
            "is not supported"
        )


def _name_labels(config: dict[str, Any], count: int) -> tuple[str, ...]:
    """Return the names of the labels; those without a name are called as by transformers."""
    names: Any = config.get("id2label")
    names = names if isinstance(names, dict) else {}
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))


def _find_label(name: str, labels: tuple[str, ...], kind: str | None) -> int:
    """Return the index of the label that means relevant: the only one, or the one named `kind`."""
    if len(labels) == 1:
        if kind not in {None, *labels}:
            raise StartupError(
                f"kind={kind} has no effect on {name}, which has one label: remove it"
            )
        return 0
    if kind is None:
        raise StartupError(
            f"{name} has the labels {', '.join(labels)}, and nothing says which of them means that "
            "a passage is relevant: name it as the kind of this model"
        )
    if kind not in labels:
        raise StartupError(f"kind={kind} is no label of {name}: it has {', '.join(labels)}")
    return labels.index(kind)


def is_classifier(folder: Path) -> bool:
    """Return whether the architecture of the model is one for sequence classification."""
    architectures = read_config(transformer_folder(folder)).get("architectures") or [""]
    return str(architectures[0]).endswith("ForSequenceClassification")


def _load_modules(folder: Path, transformer: Path, max_length: int, target: Target) -> _Scorer:
    """Load a cross-encoder of sentence-transformers' modules: a pooling and layers behind it."""
    pooling, steps = None, list[VectorLayer]()
    modules = [module for module in read_modules(folder) if module.kind != "Dropout"]
    for index, module in enumerate(modules[1:], 1):
        if module.kind == "Pooling" and index == 1:
            pooling = read_poolings(module.folder)
        elif module.kind in _STEPS and pooling is not None:
            require_vector(module.folder, last=_SCORES if index == len(modules) - 1 else None)
            steps.append(VectorLayer.read(module))
        else:
            kinds = ", ".join(module.kind for module in modules)
            raise StartupError(
                f"{folder / 'modules.json'} has the modules {kinds}; supported for a reranker: "
                "Transformer, Pooling, and then Dense and LayerNorm"
            )
    if pooling is None or not steps:
        raise StartupError(
            f"{folder} holds an embedding model and not a reranker: no module of it computes scores"
        )
    texts = replace(TextOptions.read(transformer, STATES), message_format=None)
    backbone, tokenizer = load_backbone(transformer, target, max_length, texts)
    width = backbone.hidden_size * len(pooling)
    for step in steps:
        width = step.require_width(width)
    layers = backbone.place_head(nn.Sequential(*steps), torch.float32)

    def pool_all(hidden: Tensor, packed: PackedBatch) -> Tensor:
        return pool(hidden, packed, pooling, np.arange(len(packed.lengths)))

    name = "+".join(pooling)
    return _Scorer(backbone, tokenizer, pool_all, name, layers, ENDS.get(name), width)


def _load_classifier(
    folder: Path, max_length: int, target: Target, *, marks_segments: bool
) -> _Scorer:
    """Load a classifier that transformers' own class computes, with its head."""
    if not is_classifier(folder):
        raise _no_head_error(folder)
    backbone, tokenizer = load_backbone(
        folder,
        target,
        max_length,
        replace(TextOptions.read(folder, CLASSES), message_format=None),
        classifies=True,
        marks_segments=marks_segments,
    )
    # The state of each token is the logits of its sequence.
    labels = backbone.hidden_size
    return _Scorer(backbone, tokenizer, first, "classifier", nn.Identity(), "first", labels)


def _load_own_head(folder: Path, max_length: int, target: Target) -> _Scorer:
    """Load a classifier of a type whose head is computed here."""
    weights, config = Weights.read(folder), read_config(folder)
    names = _NAMES_BY_TYPE[config["model_type"]]
    if f"{names.logits}.weight" not in weights:
        raise _no_head_error(folder)
    texts = replace(TextOptions.read(folder, CLASSES), message_format=None)
    backbone, tokenizer = load_backbone(folder, target, max_length, texts, weights=weights)
    layers = _load_layers(folder, config, names, weights, backbone.hidden_size)
    pool_states: Pool = first
    if names.reads == "last":
        pool_states = partial(_last_before_padding, config.get("pad_token_id"))
    elif names.reads == "configured":  # transformers has refused other poolings.
        pool_states = _POOLINGS[config.get("classifier_pooling", "cls")]

    def pool_rounded(hidden: Tensor, packed: PackedBatch) -> Tensor:
        return pool_states(hidden, packed).to(hidden.dtype)

    return _Scorer(
        backbone,
        tokenizer,
        pool_rounded,
        getattr(pool_states, "__name__", "last"),
        backbone.place_head(nn.Sequential(*layers)),
        "first" if pool_states is first else None,
        weights.tensors[f"{names.logits}.weight"].shape[0],
    )


def _no_head_error(folder: Path) -> StartupError:
    named = read_config(folder).get("architectures") or [""]
    if str(named[0]).endswith("ForCausalLM"):
        return StartupError(
            f"{folder} holds a language model, and its files do not say with which template it was "
            "trained to rerank: set its kind, if docs/models.md lists it"
        )
    return StartupError(
        f"{folder} holds an embedding model and not a reranker: it has no classification head"
    )


def _load_layers(
    folder: Path, config: dict[str, Any], names: _HeadNames, weights: Weights, width: int
) -> list[nn.Module]:
    """Load the layers of the head, from one state of a sequence to its logits."""
    layers: list[nn.Module] = []
    if names.dense is not None:
        # BERT's pooler has the prefix of the transformer's layers in the checkpoint.
        prefixed = weights.with_prefix_of(f"{names.dense}.weight")
        has_bias = f"{names.dense}.bias" in prefixed
        layers.append(prefixed.linear(names.dense, width, width, bias=has_bias))
        layers.append(_load_activation(folder, config, names))
        if names.norm is not None:
            epsilon = read_number(folder, config, "norm_eps", 1e-5)  # The default of ModernBERT.
            layers.append(weights.norm(names.norm, width, epsilon))
    logits = weights.tensors[f"{names.logits}.weight"].shape[0]
    return [*layers, weights.linear(names.logits, width, logits, bias=names.dense is not None)]


def _load_activation(folder: Path, config: dict[str, Any], names: _HeadNames) -> nn.Module:
    if not isinstance(names.activation, str):
        return names.activation()
    # Imported only here: families with this option have loaded transformers already.
    from transformers.activations import ACT2FN  # noqa: PLC0415

    name = str(config.get(names.activation, "gelu"))
    if name not in ACT2FN:
        raise StartupError(
            f"{folder} has the {names.activation} {name}, which transformers does not know"
        )
    return ACT2FN[name]  # type: ignore[no-any-return]


def _last_before_padding(padding: int | None, hidden: Tensor, packed: PackedBatch) -> Tensor:
    """Return `[N, hidden]`: the state of the last token that is not `padding`, as transformers."""
    starts, stops = packed.cu_seqlens[:-1].long(), packed.cu_seqlens[1:].long()
    positions = torch.arange(packed.tokens, device=packed.device)
    if padding is not None:
        positions = torch.where(packed.input_ids[0] != padding, positions, -1).cummax(0).values
    return hidden[torch.maximum(positions[stops - 1], starts)]

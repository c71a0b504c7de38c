"""Cross-encoders: classifiers of a query and a passage, with one logit or several labels.

Pairs have the layout of the tokenizer's own template, and are cut as by `FlagReranker` of
FlagEmbedding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from smart_embedder.errors import StartupError
from smart_embedder.kernels.packed_batch import SECOND_SEGMENT, PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.config import (
    CLASSES,
    TextOptions,
    read_config,
    read_default_prompt,
    read_modules,
    read_number,
    read_optional,
    require_known_modules,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.pooling import describe_layers, first, mean
from smart_embedder.models.runner import OutputSpec, RerankingModel
from smart_embedder.models.tokenizer import NO_IDS
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
# Names of the label that means relevant, by priority: the first is that of natural language
# inference, the others are those of rerankers with two labels.
_RANKING_LABELS = ("entailment", "relevant", "yes", "true")
_SECOND_OF_TWO = "label_1"
# Classes of tokenizers that mark the two texts of a pair by default.
_SEGMENT_TOKENIZERS = {"BertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"}
# The types that are computed as by FlagReranker, which leaves out an empty passage.
_FLAG_TYPES = ("xlm-roberta", "roberta")


class CrossEncoder(RerankingModel):
    """Implements `smart_embedder.interface.Reranker`.

    A score is the raw logit. With several labels it is the log odds of the label that means
    relevant, whose sigmoid is the probability of that label.
    """

    always_normalizes = False
    reads_instruction = False

    def __init__(self, name: str, folder: Path, max_length: int, target: Target) -> None:
        """Load the model; raises `StartupError` if the folder holds no cross-encoder."""
        weights, config = Weights.read(folder), read_config(folder)
        names = _find_names(folder, config)
        if f"{names.logits}.weight" not in weights:
            raise StartupError(
                f"{folder} holds an embedding model and not a reranker: it has no classification "
                "head"
            )
        require_known_modules(folder, "Transformer")
        tokenizer_config = read_optional(folder / "tokenizer_config.json")
        has_template = bool(tokenizer_config.get("chat_template"))
        has_template = has_template or (folder / "chat_template.jinja").is_file()
        if has_template and not read_modules(folder):
            raise StartupError(
                f"{folder} has a chat template for its pairs, which is not supported; without it "
                "they are read one text after the other"
            )
        require_default_prompt(folder, "")
        # Labels without a name are called as by transformers.
        names_of_labels: Any = config.get("id2label")
        names_of_labels = names_of_labels if isinstance(names_of_labels, dict) else {}
        count = weights.tensors[f"{names.logits}.weight"].shape[0]
        self.labels = tuple(
            str(names_of_labels.get(str(index), f"LABEL_{index}")) for index in range(count)
        )
        ranking_label = find_ranking_label(self.labels)
        if ranking_label is None:
            raise StartupError(
                f"{folder} cannot rerank: none of its labels, {', '.join(self.labels)}, says that "
                "a passage answers a query"
            )
        texts = TextOptions.read(folder, CLASSES)
        backbone, tokenizer = load_backbone(folder, target, max_length, texts, weights=weights)
        super().__init__(name, backbone, tokenizer)
        self._ranking_label = ranking_label
        layers = _load_layers(folder, config, names, weights, backbone.hidden_size)
        self._layers = backbone.place_head(nn.Sequential(*layers))
        self._pool: Pool = first
        if names.reads == "last":
            self._pool = partial(_last_before_padding, config.get("pad_token_id"))
        elif names.reads == "configured":  # transformers has refused other poolings.
            self._pool = _POOLINGS[config.get("classifier_pooling", "cls")]
        self._end = "first" if self._pool is first else None
        self._prefix, self._middle, self._suffix = tokenizer.pair_template()
        # With an empty passage FlagReranker reads only the query.
        self._drops_empty = config.get("model_type") in _FLAG_TYPES and count == 1
        # The tokenizer of transformers may mark each token with the text of the pair it belongs to.
        inputs = tokenizer_config.get("model_input_names")
        kind = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
        segments = kind is None or str(kind).removesuffix("Fast") in _SEGMENT_TOKENIZERS
        if isinstance(inputs, list):
            segments = "token_type_ids" in inputs
        self._marks_segments = backbone.reads_segments and segments
        reading = [ids.tolist() for ids in (self._prefix, self._middle, self._suffix)]
        reading += [self._marks_segments, self._drops_empty]
        # The names of the pooling functions are part of vector space ids.
        pooling = getattr(self._pool, "__name__", "last")
        steps = f"{self._ranking_label} {describe_layers(self._layers)}"
        self._output_specs = {SCORE: OutputSpec(pooling, count, steps=steps, reading=reading)}

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Cut the query to three quarters of the limit and each passage to the rest."""
        del instruction
        (query_tokens,) = self._tokenizer.encode_plain([query], self.max_length * 3 // 4)
        special_count = len(self._prefix) + len(self._middle) + len(self._suffix)
        limit = self.max_length - special_count - query_tokens.kept
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens)
        head = np.concatenate((self._prefix, query_tokens.ids))
        pairs: list[TokenizedPair] = []
        for text in self._tokenizer.encode_plain(passages, max(0, limit), truncation.side):
            middle = self._middle if text.total or not self._drops_empty else NO_IDS
            end = np.concatenate((middle, text.ids, self._suffix))
            if not len(head) + len(end):  # A forward needs at least one token.
                end = np.zeros(1, np.int64)
            if self._marks_segments:
                end[len(middle) :] |= SECOND_SEGMENT
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

    def _logits(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        pooled = self._pool(hidden, packed).to(hidden.dtype)
        return self._layers(pooled).float()  # type: ignore[no-any-return]

    def _relevance(self, logits: FloatArray) -> npt.NDArray[np.floating[Any]]:
        if len(self.labels) == 1:
            return logits[:, 0]
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


def find_ranking_label(labels: tuple[str, ...]) -> int | None:
    """Return the index of the label that means relevant; None if no label has such a name."""
    names = [label.lower() for label in labels]
    known = (*_RANKING_LABELS, _SECOND_OF_TWO) if len(labels) <= 2 else _RANKING_LABELS  # noqa: PLR2004
    found = (names.index(name) for name in known if name in names)
    return 0 if len(labels) == 1 else next(found, None)


def is_classifier(folder: Path) -> bool:
    """Return whether the architecture of the model is one for sequence classification."""
    architectures = read_config(folder).get("architectures") or [""]
    return str(architectures[0]).endswith("ForSequenceClassification")


def _find_names(folder: Path, config: dict[str, Any]) -> _HeadNames:
    kind = config.get("model_type")
    if kind not in _NAMES_BY_TYPE:
        raise StartupError(
            f"{folder} holds a model of type {kind}, which is not supported as a reranker: use a "
            f"cross-encoder of type {', '.join(_NAMES_BY_TYPE)}, or Qwen3-Reranker"
        )
    return _NAMES_BY_TYPE[kind]


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

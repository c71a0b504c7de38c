"""Rerankers: a query and a passage are read together.

A `CrossEncoder` is a classifier with one logit, or with several labels of which one means relevant.
Its pairs have the layout of the tokenizer's own template, and are cut as by FlagEmbedding's
`FlagReranker`. A `QwenReranker` is a causal decoder that answers whether a passage suits a query,
with the prompt and the score of Qwen3-Reranker's model card.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from smart_embedder.errors import StartupError
from smart_embedder.kernels.packed_batch import SECOND_SEGMENT, PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.config import (
    CLASSES,
    TextOptions,
    number,
    read_config,
    read_default_prompt,
    read_modules,
    read_optional,
    require_known_modules,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.pooling import first, mean, steps_of
from smart_embedder.models.runner import Made, RerankingModel
from smart_embedder.models.tokenizer import (
    NO_IDS,
)
from smart_embedder.requests import CUT_AT_END, TruncationOptions
from smart_embedder.results import FloatArray
from smart_embedder.tokens import JoinedIds, TokenizedPair
from smart_embedder.vector_space import SCORE

log = structlog.get_logger(__name__)

Pool = Callable[[Tensor, PackedBatch], Tensor]


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
# Names of the label that a passage is relevant, by priority: the first one is that of natural
# language inference, the others those of rerankers with two labels.
_RANKING_LABELS = ("entailment", "relevant", "yes", "true")
_SECOND_OF_TWO = "label_1"
# Classes of tokenizers that tell the texts of a pair apart, where a file does not say it.
_SEGMENT_TOKENIZERS = {"BertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"}
# The types that FlagReranker is for, which leaves out an empty passage.
_FLAG_TYPES = ("xlm-roberta", "roberta")


class CrossEncoder(RerankingModel):
    """Implements `smart_embedder.interface.Reranker`.

    A score is the raw logit, or of several labels the log odds of the one that means relevant,
    whose sigmoid is its probability.
    """

    scores_are_logits = True
    reads_instruction = False

    def __init__(self, name: str, folder: Path, max_length: int, target: Target) -> None:
        """Load it; raises `StartupError` where the folder holds something else."""
        weights, config = Weights.read(folder), read_config(folder)
        names = _names_of(folder, config)
        if f"{names.logits}.weight" not in weights:
            raise StartupError(
                f"{folder} holds an embedding model and not a reranker: it has no classification "
                "head"
            )
        require_known_modules(folder, "Transformer")
        texts_of_pairs = read_optional(folder / "tokenizer_config.json")
        in_config = bool(texts_of_pairs.get("chat_template"))
        if not read_modules(folder) and (in_config or (folder / "chat_template.jinja").is_file()):
            raise StartupError(
                f"{folder} has a chat template for its pairs, which is not done here; without it "
                "they are read one text after the other"
            )
        _require_prompt(folder, "")
        # Those that have no name are called as transformers calls them.
        known: Any = config.get("id2label")
        known = known if isinstance(known, dict) else {}
        count = weights.tensors[f"{names.logits}.weight"].shape[0]
        self.labels = tuple(str(known.get(str(each), f"LABEL_{each}")) for each in range(count))
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
        layers = _layers_of(folder, config, names, weights, backbone.hidden_size)
        self._layers = backbone.place_head(nn.Sequential(*layers))
        self._pool: Pool = first
        if names.reads == "last":
            self._pool = partial(_last_before_padding, config.get("pad_token_id"))
        elif names.reads == "configured":  # By one of these, or transformers had not loaded it.
            self._pool = _POOLINGS[config.get("classifier_pooling", "cls")]
        self._end = "first" if self._pool is first else None
        self._prefix, self._middle, self._suffix = tokenizer.pair_template()
        # Of a query with an empty passage FlagReranker reads the query alone.
        self._drops_empty = config.get("model_type") in _FLAG_TYPES and count == 1
        # Whether transformers' tokenizer says of each token which text of a pair it is of.
        inputs = texts_of_pairs.get("model_input_names")
        kind = texts_of_pairs.get("tokenizer_class") or config.get("tokenizer_class")
        segments = kind is None or str(kind).removesuffix("Fast") in _SEGMENT_TOKENIZERS
        if isinstance(inputs, list):
            segments = "token_type_ids" in inputs
        self._marks_segments = backbone.reads_segments and segments
        reading = [each.tolist() for each in (self._prefix, self._middle, self._suffix)]
        reading += [self._marks_segments, self._drops_empty]
        pooling = getattr(self._pool, "__name__", "last")
        steps = f"{self._ranking_label} {steps_of(self._layers)}"
        self._made = {SCORE: Made(pooling, count, steps=steps, reading=reading)}

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
        frame = len(self._prefix) + len(self._middle) + len(self._suffix)
        limit = self.max_length - frame - query_tokens.kept
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

    def _scores(self, logits: FloatArray) -> list[float]:
        own = torch.from_numpy(logits[:, self._ranking_label])
        if len(self.labels) > 1:
            # PyTorch's, because numpy warns of numbers that are not finite.
            others = torch.from_numpy(np.delete(logits, self._ranking_label, axis=1))
            own = own - others.logsumexp(dim=1)
        return own.tolist()


def _require_prompt(folder: Path, *known: str) -> None:
    """Raise `StartupError` for another prompt that sentence-transformers reads before each pair."""
    if read_modules(folder) and (prompt := read_default_prompt(folder)) not in known:
        raise StartupError(
            f"{folder} has the prompt {prompt!r:.60} for every pair (default_prompt_name), which "
            "is not done here"
        )


def find_ranking_label(labels: tuple[str, ...]) -> int | None:
    """The index of the label that a passage is relevant; None if no label has such a name."""
    names = [label.lower() for label in labels]
    known = (*_RANKING_LABELS, _SECOND_OF_TWO) if len(labels) <= 2 else _RANKING_LABELS  # noqa: PLR2004
    found = (names.index(name) for name in known if name in names)
    return 0 if len(labels) == 1 else next(found, None)


def is_classifier(folder: Path) -> bool:
    """Whether the folder's architecture is one for sequence classification."""
    named = read_config(folder).get("architectures") or [""]
    return str(named[0]).endswith("ForSequenceClassification")


def _names_of(folder: Path, config: dict[str, Any]) -> _Names:
    kind = config.get("model_type")
    if kind not in _NAMES:
        raise StartupError(
            f"{folder} is no reranker known here, being of type {kind}: use a cross-encoder of "
            f"type {', '.join(_NAMES)}, or Qwen3-Reranker"
        )
    return _NAMES[kind]


def _layers_of(
    folder: Path, config: dict[str, Any], names: _Names, weights: Weights, width: int
) -> list[nn.Module]:
    """The layers of the head, from one state of a sequence to its logits."""
    layers: list[nn.Module] = []
    if names.dense is not None:
        # BERT's pooler stands beside its layers, behind the name that they have in the checkpoint.
        of_dense = weights.before(f"{names.dense}.weight")
        has_bias = f"{names.dense}.bias" in of_dense
        layers.append(of_dense.linear(names.dense, width, width, bias=has_bias))
        layers.append(_activation(folder, config, names))
        if names.norm is not None:
            epsilon = number(folder, config, "norm_eps", 1e-5)  # ModernBERT's.
            layers.append(weights.norm(names.norm, width, epsilon))
    logits = weights.tensors[f"{names.logits}.weight"].shape[0]
    return [*layers, weights.linear(names.logits, width, logits, bias=names.dense is not None)]


def _activation(folder: Path, config: dict[str, Any], names: _Names) -> nn.Module:
    if not isinstance(names.activation, str):
        return names.activation()
    # Where a configuration says it, the backbone was loaded by transformers.
    from transformers.activations import ACT2FN  # noqa: PLC0415

    name = str(config.get(names.activation, "gelu"))
    if name not in ACT2FN:
        raise StartupError(
            f"{folder} has the {names.activation} {name}, which transformers does not know"
        )
    return ACT2FN[name]  # type: ignore[no-any-return]


def _last_before_padding(padding: int | None, hidden: Tensor, packed: PackedBatch) -> Tensor:
    """`[N, hidden]`: the last token that is not `padding`, where transformers ends a text."""
    starts, stops = packed.cu_seqlens[:-1].long(), packed.cu_seqlens[1:].long()
    places = torch.arange(packed.tokens, device=packed.device)
    if padding is not None:
        places = torch.where(packed.input_ids[0] != padding, places, -1).cummax(0).values
    return hidden[torch.maximum(places[stops - 1], starts)]


# The table of tokens, behind the prefix that it has in checkpoints with a head.
_TOKENS, _PREFIX = "embed_tokens.weight", "model."

"""bge-reranker-v2-m3: query and passage read together by a classifier with one logit.

The pair's layout and the way it is cut follow FlagEmbedding's `FlagReranker`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from app.engine.options import CUT_AT_END, TruncationOptions
from app.engine.types import JoinedIds, Outputs, TokenIds, TokenizedPair
from app.errors import InferenceError, StartupError
from app.models.backbone import Backbone, Target, load_encoder, load_tokenizer
from app.models.batch.packing import PackedBatch
from app.models.checkpoint.config import read_config
from app.models.checkpoint.weights import Weights
from app.models.device.transfer import DeviceRows, not_finite, start_copies
from app.models.tasks.device_model import DeviceModel
from app.models.text.template import NO_IDS
from app.models.text.tokenizer import TextTokenizer, TruncatedTokens

_CLASSIFIER_TYPES = ("xlm-roberta", "roberta")
_LOGITS = "classifier.out_proj.weight"


class CrossEncoder(DeviceModel[float]):
    """Implements `app.engine.model.Reranker`; a score is the raw logit."""

    scores_are_logits = True
    reads_instruction = False

    def __init__(
        self, name: str, backbone: Backbone, classifier: nn.Module, tokenizer: TextTokenizer
    ) -> None:
        super().__init__(name, backbone, tokenizer)
        self._classifier = classifier
        self._template = tokenizer.pair_template()

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """The query cut to three quarters of the limit, each passage to the rest.

        A cross-encoder has no use for an instruction.
        """
        del instruction
        (query_tokens,) = self._tokenizer.encode_plain([query], self.max_length * 3 // 4)
        limit = self.max_length - len(self._template) - query_tokens.kept
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens)
        ends = self._tokenizer.encode_plain(passages, max(0, limit), truncation.side)
        head = np.concatenate((self._template.prefix, query_tokens.ids))
        return [self._join(head, query_tokens, passage) for passage in ends]

    def _join(
        self, head: TokenIds, query: TruncatedTokens, passage: TruncatedTokens
    ) -> TokenizedPair:
        template = self._template
        # FlagReranker reads a query whose passage is empty as a text alone.
        middle = template.middle if passage.total else NO_IDS
        return TokenizedPair(
            sequence=JoinedIds(head, passage.take(middle, template.suffix)),
            query_tokens=query.total,
            query_kept=query.kept,
            passage_tokens=passage.total,
            passage_kept=passage.kept,
            query_exact=query.exact,
            passage_exact=passage.exact,
        )

    def finish_loading(self) -> None:
        """Implement `DeviceModel`."""
        self._backbone.finish_loading()

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[float | InferenceError]]:
        """Implement `DeviceModel`: the logit of each pair."""
        del outputs
        packed = self._backbone.pack(sequences)
        logits = self._classify(self._backbone.forward(packed), packed)
        return start_scores(logits, packed)

    def _classify(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        first = hidden[packed.cu_seqlens[:-1].long()]
        return self._classifier(first).float().squeeze(-1)  # type: ignore[no-any-return]


def load_cross_encoder(name: str, folder: Path, max_length: int, target: Target) -> CrossEncoder:
    """Load a one-logit classifier; raise `StartupError` where the folder holds something else."""
    if read_config(folder).get("model_type") not in _CLASSIFIER_TYPES:
        raise StartupError(
            f"{folder} is no reranker known here: use bge-reranker or Qwen3-Reranker"
        )
    weights = Weights.read(folder)
    _require_one_logit(weights)
    tokenizer = load_tokenizer(folder, max_length)
    backbone = load_encoder(folder, target, tokenizer, weights)
    return CrossEncoder(name, backbone, _classifier(weights, backbone), tokenizer)


def _require_one_logit(weights: Weights) -> None:
    if _LOGITS not in weights:
        raise StartupError(
            f"{weights.folder} holds an embedding model and not a reranker: it has no "
            "classification head"
        )
    logits = len(weights.tensors[_LOGITS])
    if logits != 1:
        raise StartupError(f"{weights.folder} gives {logits} logits; a reranker gives one")


def _classifier(weights: Weights, backbone: Backbone) -> nn.Module:
    """From the state of a pair's first token to its logit."""
    width = backbone.hidden_size
    layers = (
        weights.linear("classifier.dense", width, width),
        nn.Tanh(),
        weights.linear("classifier.out_proj", width, 1),
    )
    return nn.Sequential(*layers).to(backbone.device, backbone.dtype)


def start_scores(
    logits: Tensor, packed: PackedBatch, *, as_probabilities: bool = False
) -> Callable[[], list[float | InferenceError]]:
    """Begin to copy logits `[N]`, in packed order, to the host; collected in the order given.

    For one that is not finite there is an `InferenceError`.
    """
    copies = start_copies([DeviceRows.of(logits)])

    def collect() -> list[float | InferenceError]:
        (rows,) = copies()
        scores = torch.from_numpy(rows.values)
        values = (torch.sigmoid(scores) if as_probabilities else scores).tolist()
        return [
            values[place] if rows.finite[place] else not_finite() for place in packed.unpack_order
        ]

    return collect

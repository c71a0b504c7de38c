"""Cross-encoders: query and passage read together by a classifier with one logit or several.

The pair's layout is that of the tokenizer's own template; the way it is cut follows FlagEmbedding's
`FlagReranker`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from app.engine.options import CUT_AT_END, TruncationOptions
from app.engine.types import (
    FloatArray,
    JoinedIds,
    Outputs,
    TokenIds,
    TokenizedPair,
    TokenizedText,
)
from app.errors import InferenceError, StartupError
from app.models.backbones.backbone import Backbone
from app.models.backbones.families import load_backbone
from app.models.batch.marks import SECOND_SEGMENT
from app.models.checkpoint.config import read_config, read_optional
from app.models.checkpoint.modules import read_modules, require_known_modules
from app.models.checkpoint.sentence_config import TextOptions
from app.models.checkpoint.weights import Weights
from app.models.device.transfer import DeviceRows, not_finite, start_copies
from app.models.target import Target
from app.models.tasks.classification_head import (
    ClassificationHead,
    load_classification_head,
    require_classifier,
)
from app.models.tasks.device_model import DeviceModel
from app.models.text.template import NO_IDS
from app.models.text.tokenizer import TextTokenizer, TruncatedTokens

# Names of the label that a passage is relevant, by priority: the first one is that of natural
# language inference, the others those of rerankers with two labels.
_RANKING_LABELS = ("entailment", "relevant", "yes", "true")
_SECOND_OF_TWO = "label_1"
# Classes of tokenizers that tell the texts of a pair apart, where a file does not say it.
_SEGMENT_TOKENIZERS = {"BertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"}
# The types that FlagReranker is for, which leaves out an empty passage.
_FLAG_TYPES = ("xlm-roberta", "roberta")


class CrossEncoder(DeviceModel[float | FloatArray]):
    """Implements `app.engine.model.Reranker` and `Classifier`.

    With `drops_empty`, a query whose passage is empty is read as a single text. With `segments`,
    the passage is marked as the second text where the model tells them apart. A score is the raw
    logit, or of several labels the log odds of `ranking_label`, whose sigmoid is its probability.
    """

    scores_are_logits = True
    reads_instruction = False

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        head: ClassificationHead,
        tokenizer: TextTokenizer,
        *,
        drops_empty: bool,
        segments: bool,
    ) -> None:
        super().__init__(name, backbone, tokenizer)
        self.labels = head.labels
        self.ranking_label = find_ranking_label(head.labels)
        self._head = head
        self._template = tokenizer.pair_template()
        self._drops_empty = drops_empty
        self._marks_segments = backbone.reads_segments and segments

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Cut the query to three quarters of the limit and each passage to the rest.

        A cross-encoder reads no instruction.
        """
        del instruction
        (query_tokens,) = self._tokenizer.encode_plain([query], self.max_length * 3 // 4)
        limit = self.max_length - len(self._template) - query_tokens.kept
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens)
        cut_passages = self._tokenizer.encode_plain(passages, max(0, limit), truncation.side)
        head = np.concatenate((self._template.prefix, query_tokens.ids))
        return [self._join(head, query_tokens, passage) for passage in cut_passages]

    def tokenize_input(
        self, text: str, other: str | None, truncation: TruncationOptions = CUT_AT_END
    ) -> TokenizedText:
        """Token ids of a text alone, or of a pair, cut as a query and a passage are."""
        if other is None:
            return self._tokenizer.encode([text], truncation=truncation)[0]
        (pair,) = self.tokenize_pairs(text, [other], None, truncation)
        cut = pair.query_tokens - pair.query_kept + pair.passage_tokens - pair.passage_kept
        exact = pair.query_exact and pair.passage_exact
        return TokenizedText(pair.ids, len(pair.sequence) + cut, exact)

    def _join(
        self, head: TokenIds, query: TruncatedTokens, passage: TruncatedTokens
    ) -> TokenizedPair:
        template = self._template
        alone = self._drops_empty and not passage.total
        middle = NO_IDS if alone else template.middle
        end = passage.take(middle, template.suffix)
        if not len(head) + len(end):  # A forward needs at least one token.
            end = np.zeros(1, np.int64)
        if self._marks_segments:
            end[len(middle) :] |= SECOND_SEGMENT
        return TokenizedPair(
            sequence=JoinedIds(head, end),
            query_tokens=query.total,
            query_kept=query.kept,
            passage_tokens=passage.total,
            passage_kept=passage.kept,
            query_exact=query.exact,
            passage_exact=passage.exact,
        )

    @property
    def refusal(self) -> str | None:
        """Implement `app.engine.model.Reranker`."""
        if self.ranking_label is not None:
            return None
        return (
            f"{self.name} cannot rerank: none of its labels, {', '.join(self.labels)}, says that a "
            "passage answers a query; /predict tells their probabilities"
        )

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[float | FloatArray | InferenceError]]:
        """Implement `DeviceModel`: the score of each pair, or all its logits if asked for."""
        packed = self._backbone.pack(sequences)
        logits = self._head(self._backbone.forward(packed), packed)
        copies = start_copies([DeviceRows.of(logits)])

        def collect() -> list[float | FloatArray | InferenceError]:
            (rows,) = copies()
            scores = self._scores(rows.values)
            return [
                (rows.values[row] if outputs[index].logits else scores[row])
                if rows.finite[row]
                else not_finite()
                for index, row in enumerate(packed.unpack_order)
            ]

        return collect

    def _scores(self, logits: FloatArray) -> list[float]:
        """The score of each row of `[N, labels]`; 0 without a ranking label."""
        if logits.shape[1] == 1:
            return logits[:, 0].tolist()  # type: ignore[no-any-return]
        if self.ranking_label is None:
            return [0.0] * len(logits)
        # PyTorch's, because numpy warns of numbers that are not finite.
        others = torch.from_numpy(np.delete(logits, self.ranking_label, axis=1))
        log_odds = torch.from_numpy(logits[:, self.ranking_label]) - others.logsumexp(dim=1)
        return log_odds.tolist()


def load_cross_encoder(name: str, folder: Path, max_length: int, target: Target) -> CrossEncoder:
    """Load a classifier; raise `StartupError` where the folder holds something else."""
    weights = Weights.read(folder)
    require_classifier(folder, weights)
    _require_plain_pairs(folder)
    texts = TextOptions.read(folder)
    backbone, tokenizer = load_backbone(folder, target, max_length, texts, weights=weights)
    head = load_classification_head(folder, weights, backbone)
    flag = read_config(folder).get("model_type") in _FLAG_TYPES and len(head.labels) == 1
    segments = _tells_segments(folder)
    return CrossEncoder(name, backbone, head, tokenizer, drops_empty=flag, segments=segments)


def _tells_segments(folder: Path) -> bool:
    """Whether transformers' tokenizer says of each token which text of a pair it is of."""
    config = read_optional(folder / "tokenizer_config.json")
    names = config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    kind = config.get("tokenizer_class") or read_config(folder).get("tokenizer_class")
    return kind is None or str(kind).removesuffix("Fast") in _SEGMENT_TOKENIZERS


def _require_plain_pairs(folder: Path) -> None:
    """Raise `StartupError` where sentence-transformers makes something else of pairs or states."""
    require_known_modules(folder, "Transformer")
    in_config = bool(read_optional(folder / "tokenizer_config.json").get("chat_template"))
    if not read_modules(folder) and (in_config or (folder / "chat_template.jinja").is_file()):
        raise StartupError(
            f"{folder} has a chat template for its pairs, which is not done here; without it they "
            "are read one text after the other"
        )


def find_ranking_label(labels: tuple[str, ...]) -> int | None:
    """The index of the label that a passage is relevant; None if no label has such a name."""
    names = [label.lower() for label in labels]
    known = (*_RANKING_LABELS, _SECOND_OF_TWO) if len(labels) <= 2 else _RANKING_LABELS  # noqa: PLR2004
    found = (names.index(name) for name in known if name in names)
    return 0 if len(labels) == 1 else next(found, None)

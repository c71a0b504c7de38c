"""Qwen3-Reranker: a causal decoder that answers whether a passage suits a query.

The score is that of the Qwen3-Reranker model card.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import torch
from torch import Tensor

from app.engine.options import CUT_AT_END, TruncationOptions
from app.engine.types import Outputs, TokenIds, TokenizedPair
from app.errors import InferenceError, StartupError
from app.models.architectures.qwen3 import vocabulary_head
from app.models.architectures.qwen3_config import DecoderConfig
from app.models.backbones.backbone import Backbone
from app.models.backbones.by_architectures import load_decoder
from app.models.checkpoint.config import read_config, read_optional
from app.models.checkpoint.modules import read_modules, require_known_modules
from app.models.checkpoint.weights import Weights
from app.models.device.transfer import DeviceRows, not_finite, start_copies
from app.models.target import Target
from app.models.tasks.device_model import DeviceModel
from app.models.tasks.pooling import last
from app.models.text.qwen_prompt import DEFAULT_INSTRUCTION, QwenTemplate
from app.models.text.tokenizer import TextTokenizer

log = structlog.get_logger(__name__)

_ARCHITECTURE = "Qwen3ForCausalLM"
# The table of tokens, behind the prefix that it has in checkpoints with a head.
_TOKENS, _PREFIX = "embed_tokens.weight", "model."


class QwenReranker(DeviceModel[float]):
    """Implements `app.engine.model.Reranker`; a score is the probability of yes against no."""

    scores_are_logits = False
    reads_instruction = True
    refusal: str | None = None

    def __init__(
        self,
        *,
        name: str,
        backbone: Backbone,
        yes_minus_no: Tensor,
        tokenizer: TextTokenizer,
        max_batch_sequences: int,
    ) -> None:
        super().__init__(name, backbone, tokenizer)
        self.max_batch_sequences = max_batch_sequences
        self._yes_minus_no = yes_minus_no
        self._template = QwenTemplate(tokenizer)

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Fill in the template; only its content is cut, a passage before what precedes it."""
        return self._template.pairs(query, passages, instruction or DEFAULT_INSTRUCTION, truncation)

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[float | InferenceError]]:
        """Implement `DeviceModel`: the probability of yes, from two rows of the head."""
        del outputs
        packed = self._backbone.pack(sequences)
        states = last(self._backbone.forward(packed), packed)
        copies = start_copies([DeviceRows.of(states @ self._yes_minus_no)])

        def collect() -> list[float | InferenceError]:
            (rows,) = copies()
            scores = torch.sigmoid(torch.from_numpy(rows.values)).tolist()
            return [
                scores[row] if rows.finite[row] else not_finite() for row in packed.unpack_order
            ]

        return collect


def load_qwen_reranker(
    name: str, folder: Path, max_length: int, max_batch_sequences: int, target: Target
) -> QwenReranker:
    """Load Qwen3-Reranker; raises `StartupError` where the folder holds something else.

    A language model that was trained for something else has the same files: a name that does not
    say what it is for is logged.
    """
    weights = Weights.read(folder)
    _require_language_model(folder, weights)
    if "rerank" not in name.lower():
        log.warning(
            "language_model_reranks",
            model=name,
            detail="its scores are those of Qwen3-Reranker's prompt, and mean little where it was "
            "not trained with it",
        )
    backbone = load_decoder(folder, target, weights)
    tokenizer = TextTokenizer.from_folder(folder, min(max_length, backbone.max_length))
    return QwenReranker(
        name=name,
        backbone=backbone,
        yes_minus_no=_yes_minus_no(weights, tokenizer).to(target.device),
        tokenizer=tokenizer,
        max_batch_sequences=max_batch_sequences,
    )


def _require_language_model(folder: Path, weights: Weights) -> None:
    """Raise `StartupError` where architecture or tensors are not those of a language model."""
    if (folder / "1_Pooling").is_dir() or weights.before(_TOKENS).prefix != _PREFIX:
        raise StartupError(
            f"{folder} holds an embedding model and not a reranker: it has no head of a language "
            "model"
        )
    require_known_modules(folder, "Transformer", "LogitScore")
    named = read_config(folder).get("architectures") or [_ARCHITECTURE]
    if named[0] != _ARCHITECTURE:
        raise StartupError(
            f"{folder} holds a {named[0]}, which is no reranker: known of type qwen3 are "
            f"{_ARCHITECTURE}, as Qwen3-Reranker, and Qwen3ForSequenceClassification"
        )


def _yes_minus_no(weights: Weights, tokenizer: TextTokenizer) -> Tensor:
    """`[hidden]` float32: the one direction of the vocabulary's head that the score needs."""
    yes, no = tokenizer.token_id("yes"), tokenizer.token_id("no")
    if yes is None or no is None:
        raise StartupError(f"the vocabulary in {weights.folder} has no tokens yes and no")
    for module in read_modules(weights.folder):
        config = read_optional(module.folder / "config.json")
        answers = config.get("true_token_id"), config.get("false_token_id")
        if module.kind == "LogitScore" and answers != (yes, no):
            raise StartupError(
                f"{module.folder} compares other tokens than yes and no, which is not done here"
            )
    sizes = DecoderConfig.read(weights.folder)
    yes_row, no_row = (vocabulary_head(weights, sizes, token) for token in (yes, no))
    return yes_row.float() - no_row.float()

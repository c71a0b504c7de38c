"""Qwen3-Reranker: a causal decoder that answers whether a passage suits a query.

The score is that of the Qwen3-Reranker model card.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import structlog
import torch
from torch import Tensor

from smart_embedder.engine.records import (
    CUT_AT_END,
    JoinedIds,
    Outputs,
    TokenIds,
    TokenizedPair,
    TruncationOptions,
)
from smart_embedder.errors import InferenceError, StartupError
from smart_embedder.models.checkpoint.config import (
    read_config,
    read_modules,
    read_optional,
    require_known_modules,
)
from smart_embedder.models.checkpoint.weights import Weights
from smart_embedder.models.device.transfer import DeviceRows, not_finite, start_copies
from smart_embedder.models.families.load import load_decoder
from smart_embedder.models.families.qwen3 import DecoderConfig, vocabulary_head
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.base import DeviceModel
from smart_embedder.models.tasks.pooling import last
from smart_embedder.models.text.tokenizer import NO_IDS, TextTokenizer, TruncatedTokens

log = structlog.get_logger(__name__)

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_BEHIND_QUERY = "\n<Document>:"
_ARCHITECTURE = "Qwen3ForCausalLM"
# The table of tokens, behind the prefix that it has in checkpoints with a head.
_TOKENS, _PREFIX = "embed_tokens.weight", "model."


class QwenReranker(DeviceModel[float]):
    """Implements `engine.model.Reranker`; a score is the probability of yes against no."""

    scores_are_logits = False
    reads_instruction = True
    refusal: str | None = None

    def __init__(
        self, name: str, folder: Path, max_length: int, max_batch_sequences: int, target: Target
    ) -> None:
        """Load it; raises `StartupError` where the folder holds something else.

        A language model that was trained for something else has the same files: a name that does
        not say what it is for is logged.
        """
        weights = Weights.read(folder)
        if (folder / "1_Pooling").is_dir() or weights.before(_TOKENS).prefix != _PREFIX:
            raise StartupError(
                f"{folder} holds an embedding model and not a reranker: it has no head of a "
                "language model"
            )
        require_known_modules(folder, "Transformer", "LogitScore")
        named = read_config(folder).get("architectures") or [_ARCHITECTURE]
        if named[0] != _ARCHITECTURE:
            raise StartupError(
                f"{folder} holds a {named[0]}, which is no reranker: known of type qwen3 are "
                f"{_ARCHITECTURE}, as Qwen3-Reranker, and Qwen3ForSequenceClassification"
            )
        if "rerank" not in name.lower():
            log.warning(
                "language_model_reranks",
                model=name,
                detail="its scores are those of Qwen3-Reranker's prompt, and mean little where it "
                "was not trained with it",
            )
        backbone = load_decoder(folder, target, weights)
        tokenizer = TextTokenizer.from_folder(folder, min(max_length, backbone.max_length))
        super().__init__(name, backbone, tokenizer)
        self.max_batch_sequences = max_batch_sequences
        self._yes_minus_no = _yes_minus_no(weights, tokenizer).to(target.device)
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


class QwenTemplate:
    """Makes pairs of a query and passages; only the content is cut, not the template."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        fixed = tokenizer.encode_plain([PREFIX, SUFFIX, " ", _BEHIND_QUERY], len(PREFIX))
        self.prefix, self.suffix, self._space, self._behind_query = (text.ids for text in fixed)
        frame = len(self.prefix) + len(self.suffix)
        self._limit = tokenizer.max_length - frame
        if self._limit < 1:
            raise StartupError(
                f"a length limit of {tokenizer.max_length} tokens leaves no room beside the "
                f"{frame} tokens of the reranker's template"
            )

    def pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """The query with each passage; the part before a passage is cut only after the passage."""
        texts = [f"<Instruct>: {instruction}\n<Query>:", f" {query}{_BEHIND_QUERY}"]
        before, query_tokens = self._tokenizer.encode_plain(texts, self._limit)
        content = np.concatenate((before.ids, query_tokens.ids))[: self._limit]
        head = np.concatenate((self.prefix, content))
        # Of the tokens before a passage, those of the query itself; lower bounds where not `exact`.
        tokens = before.total + query_tokens.total
        query_start = before.total + self._spaces(query_tokens)
        query_stop = tokens
        exact = before.exact and query_tokens.exact
        if query_tokens.exact:
            behind = self._behind_query
            # A line's end that is one with the query's last token is of the query.
            alone = query_tokens.last[-len(behind) :] == behind.tolist()
            query_stop -= len(behind) if alone else len(behind) - 1
        limit = max(0, self._limit - tokens)
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens)
        pairs: list[TokenizedPair] = []
        passages = [f" {passage}" for passage in passages]
        for end in self._tokenizer.encode_plain(passages, limit, truncation.side):
            spaces = self._spaces(end)
            # Where the passage is cut from the left, the template's space is the first to go.
            spaces_kept = 0 if end.side == "left" and end.total > end.kept else spaces
            kept = min(self._limit, tokens + end.total)
            pairs.append(
                TokenizedPair(
                    sequence=JoinedIds(head, end.take(NO_IDS, self.suffix)),
                    query_tokens=query_stop - query_start,
                    query_kept=max(0, min(kept, query_stop) - query_start),
                    passage_tokens=end.total - spaces,
                    passage_kept=max(0, end.kept - spaces_kept),
                    query_exact=exact,
                    passage_exact=end.exact,
                )
            )
        return pairs

    def _spaces(self, text: TruncatedTokens) -> int:
        """Tokens of the template's space; none where it is part of the text's first token."""
        space = self._space
        return len(space) if text.first[: len(space)] == space.tolist() and len(space) else 0

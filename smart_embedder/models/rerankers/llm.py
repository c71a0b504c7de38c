"""Qwen3-Reranker: a causal language model answers whether a passage suits a query.

The prompt and the score are those of its model card: the probability of yes against no.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from smart_embedder.errors import StartupError
from smart_embedder.kernels.packed_batch import End, PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.int8 import CALIBRATION_TEXTS
from smart_embedder.models.families.qwen3 import DecoderConfig
from smart_embedder.models.families.registry import load_decoder
from smart_embedder.models.files.config import read_config, require_known_modules
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION
from smart_embedder.models.heads.pooling import last
from smart_embedder.models.rerankers.cross_encoder import require_default_prompt
from smart_embedder.models.rerankers.templates import (
    INSTRUCTION,
    KINDS,
    PASSAGE,
    QUERY,
    QWEN3_RERANKER,
    Template,
    has_scores,
    place_answers,
    read_answers,
)
from smart_embedder.models.runner import OutputSpec, RerankingModel
from smart_embedder.models.tokenizer import TextTokenizer, TruncatedTokens, cut_text
from smart_embedder.requests import CUT_AT_END, TruncationOptions
from smart_embedder.tokens import JoinedIds, TokenizedPair
from smart_embedder.vector_space import SCORE

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_BEHIND_QUERY = "\n<Document>:"
_PROMPT = f"{PREFIX}<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}{_BEHIND_QUERY} {PASSAGE}{SUFFIX}"
_ARCHITECTURE = "Qwen3ForCausalLM"
_ANSWERS = ("yes", "no")
# The rows of the published model's head.
_PUBLISHED_ROWS = 151_669
# The embeddings of tokens, and their prefix in checkpoints with a head.
_TOKENS, _PREFIX = "embed_tokens.weight", "model."
# The head of a checkpoint for classification.
_CLASSIFIER = "score.weight"


class QwenReranker(RerankingModel):
    """Implements `interface.Reranker`; a score is the probability of yes against no."""

    _end: End | None = "last"
    _output_specs: Mapping[str, OutputSpec] = {
        SCORE: OutputSpec("last", 1, steps="yes", reading=(PREFIX, SUFFIX, DEFAULT_INSTRUCTION))
    }
    always_normalizes = True
    reads_instruction = True

    def __init__(
        self,
        name: str,
        folder: Path,
        max_length: int,
        max_batch_sequences: int,
        target: Target,
        *,
        kind: str | None = None,
    ) -> None:
        """Load the model; raises `StartupError` if nothing says that it is a Qwen3-Reranker.

        That are its configuration and its vocabulary, or `kind`.
        """
        if kind not in {None, QWEN3_RERANKER}:
            raise StartupError(
                f"kind={kind} is unknown for {name}, a language model: known are {KINDS}"
            )
        weights = Weights.read(folder)
        if (folder / "1_Pooling").is_dir() or weights.with_prefix_of(_TOKENS).prefix != _PREFIX:
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
        if _CLASSIFIER in weights:
            raise StartupError(
                f"{folder} holds a classifier by its weights, and config.json names no architecture"
            )
        # sentence-transformers puts the default prompt into the template as the instruction.
        require_default_prompt(folder, "", DEFAULT_INSTRUCTION)
        positions = DecoderConfig.read(folder).positions
        tokenizer = TextTokenizer.from_folder(folder, min(max_length, positions))
        # Other language models of this type have unused rows, or a chat template.
        rows = {tokenizer.vocabulary_size, _PUBLISHED_ROWS}
        is_published = DecoderConfig.read(folder).vocabulary in rows and not has_scores(folder)
        if kind is None and not is_published:
            raise StartupError(
                f"{name} is a language model, and its files do not say with which template it was "
                f"trained to rerank: set its kind to one of {KINDS}"
            )
        self._fill = QwenTemplate(tokenizer).fill
        query, *passages = CALIBRATION_TEXTS[1::3]
        pairs = self._fill(query, passages, None, CUT_AT_END)
        backbone = load_decoder(folder, target, weights, [pair.ids for pair in pairs])
        super().__init__(name, backbone, tokenizer)
        self.max_batch_sequences = max_batch_sequences
        answers = read_answers(folder) if has_scores(folder) else _ANSWERS
        self._yes_minus_no = place_answers(backbone, weights, tokenizer, answers)

    def _logits(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        return self._yes_minus_no(last(hidden, packed)).squeeze(1)  # type: ignore[no-any-return]


def has_published_prompts(template: Template) -> bool:
    """Return whether a chat template makes the prompts of Qwen3-Reranker."""
    prompts = [(_PROMPT.replace(INSTRUCTION, DEFAULT_INSTRUCTION),), (_PROMPT,)]
    default = template.default_instruction in {None, DEFAULT_INSTRUCTION}
    return default and [template.parts, template.instructed] == prompts


class QwenTemplate:
    """Puts a query and passages into the prompt; the prompt itself is never cut."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        fixed = tokenizer.encode_plain([PREFIX, SUFFIX, " ", _BEHIND_QUERY], len(PREFIX))
        self.prefix, self.suffix, self._space, self._behind_query = (text.ids for text in fixed)
        fixed_count = len(self.prefix) + len(self.suffix)
        self._limit = tokenizer.max_length - fixed_count
        if self._limit < 1:
            raise StartupError(
                f"a length limit of {tokenizer.max_length} tokens leaves no room beside the "
                f"{fixed_count} tokens of the reranker's template"
            )

    def fill(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Make a pair of the query with each passage, cut to the limit: first the passage."""
        instruction = instruction or DEFAULT_INSTRUCTION
        # Cut to one token less than the limit, into which the words around them fit.
        cut_instruction, cut_query = (
            cut_text(text, self._limit - 1) for text in (instruction, query)
        )
        exact = len(cut_instruction) == len(instruction) and len(cut_query) == len(query)
        texts = [f"<Instruct>: {cut_instruction}\n<Query>:", f" {cut_query}{_BEHIND_QUERY}"]
        before, query_tokens = self._tokenizer.encode_plain(texts, self._limit)
        content = np.concatenate((before.ids, query_tokens.ids))[: self._limit]
        head = np.concatenate((self.prefix, content))
        # Find the query's own tokens among those before a passage.
        tokens = before.total + query_tokens.total
        query_start = before.total + self._count_spaces(query_tokens)
        behind = self._behind_query
        # The line break behind the query may be one token with the end of the query, and counts.
        is_separate = query_tokens.last[-len(behind) :] == behind.tolist()
        query_stop = tokens - (len(behind) if is_separate else len(behind) - 1)
        limit = max(0, self._limit - tokens)
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens)
        pairs: list[TokenizedPair] = []
        spaced = [f" {passage}" for passage in passages]
        for passage in self._tokenizer.encode_plain(spaced, limit, truncation.side):
            spaces = self._count_spaces(passage)
            # A passage that is cut from the left loses the space of the template first.
            is_cut_left = passage.side == "left" and passage.total > passage.kept
            spaces_kept = 0 if is_cut_left else spaces
            kept = min(self._limit, tokens + passage.total)
            pairs.append(
                TokenizedPair(
                    sequence=JoinedIds(head, np.concatenate((passage.ids, self.suffix))),
                    query_tokens=query_stop - query_start + (not exact),
                    query_kept=max(0, min(kept, query_stop) - query_start),
                    passage_tokens=passage.total - spaces,
                    passage_kept=max(0, passage.kept - spaces_kept),
                    query_exact=exact,
                    passage_exact=passage.exact,
                )
            )
        return pairs

    def _count_spaces(self, text: TruncatedTokens) -> int:
        """Count the tokens of the template's space; 0 if it is part of the text's first token."""
        space = self._space
        return len(space) if text.first[: len(space)] == space.tolist() and len(space) else 0

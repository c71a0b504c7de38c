"""Language models that rerank with a template: one that `kind` names, or the folder's own.

The score of a pair is the logit of one token behind the filled-in template, or the difference of
two.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from smart_embedder.errors import InvalidRequestError, StartupError
from smart_embedder.kernels.backend import make_linear
from smart_embedder.kernels.packed_batch import End, PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.chat_template import ChatTemplate
from smart_embedder.models.files.config import (
    LANGUAGE,
    STATES,
    TextOptions,
    read_config,
    read_default_prompt,
    read_integer,
    read_modules,
    require_known_modules,
    transformer_folder,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.pooling import last
from smart_embedder.models.runner import OutputSpec, RerankingModel
from smart_embedder.models.tokenizer import NO_IDS, TextTokenizer, cut_text
from smart_embedder.requests import CUT_AT_END, Side, TruncationOptions
from smart_embedder.tokens import JoinedIds, TokenIds, TokenizedPair
from smart_embedder.vector_space import SCORE

# Where a template has the texts: characters for private use, which no template has otherwise.
QUERY, PASSAGE, INSTRUCTION = "\ue000", "\ue001", "\ue002"
_MARKERS = re.compile(f"([{QUERY}{PASSAGE}{INSTRUCTION}])")
# Texts with which the rendering of a chat template is tried, with spaces that it may remove.
_EXAMPLES = {QUERY: " a Query? ", PASSAGE: "\nthe Document: 0.\n\n", INSTRUCTION: " Find it "}
# The module that makes scores of a language model's logits, and what it reads.
_LOGIT_SCORE, _LOGITS = "LogitScore", "causal_logits"
_HEAD, _TOKENS = "lm_head.weight", "embed_tokens.weight"
# Types whose logits are the products of the head and the states, without further steps.
PLAIN_HEADS = {
    "gemma", "gemma3_text", "llama", "ministral", "ministral3", "mistral", "olmo2", "olmo3",
    "phi3", "qwen2", "qwen3", "smollm3",
}  # fmt: skip

_TIED_BY_DEFAULT = {"gemma", "gemma3_text", "smollm3"}


@dataclass(frozen=True, slots=True)
class Template:
    """The parts of a prompt, which are tokenized one by one, and how its score is made.

    With an instruction, `instructed` takes the place of `parts`; it is empty for a model that reads
    none. The score is the logit of a token in `answers`, minus that of a second one, if there is
    one; they are strings or ids.
    """

    parts: tuple[str, ...]
    answers: tuple[str | int, ...] = ()
    instructed: tuple[str, ...] = ()
    default_instruction: str | None = None
    architectures: tuple[str, ...] = ()
    temperature: float = 1.0
    strips: bool = False
    has_special_tokens: bool = False


_MXBAI_SYSTEM = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n<|im_start|>user\n"
)
_MXBAI_PAIR = (
    f"query: {QUERY}", "\n", f"document: {PASSAGE}", "\n",
    ("You are a search relevance expert who evaluates how well documents match search queries. For "
     "each query-document pair, carefully analyze the semantic relationship between them, then "
     "provide your binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"),
    "<|im_end|>\n<|im_start|>assistant\n",
)  # fmt: skip
_CTXL = (
    "Check whether a given document contains information helpful to answer the query.\n"
    f"<Document> {PASSAGE}\n<Query> {QUERY}"
)
TEMPLATES = {
    # FlagLLMReranker of FlagEmbedding.
    "bge-reranker-v2-gemma": Template(
        ("<bos>", f"A: {QUERY}", "\n", f"B: {PASSAGE}", "\n",
         ("Given a query A and a passage B, determine whether the passage contains an answer to "
          "the query by providing a prediction of either 'Yes' or 'No'.")),
        ("Yes",), architectures=("GemmaForCausalLM",),
    ),
    # Its model card, for all sizes.
    "ctxl-rerank-v2": Template(
        (f"{_CTXL} ??",), (0,), instructed=(f"{_CTXL} {INSTRUCTION} ??",), has_special_tokens=True,
        architectures=("Qwen3ForCausalLM", "MistralForCausalLM"),
    ),
    # The package mxbai-rerank.
    "mxbai-rerank-v2": Template(
        (_MXBAI_SYSTEM, *_MXBAI_PAIR), ("1", "0"),
        instructed=(_MXBAI_SYSTEM, f"instruction: {INSTRUCTION}", "\n", *_MXBAI_PAIR),
        architectures=("Qwen2ForCausalLM",),
    ),
    # Its model card: Qwen3's chat template, with the query as the system's message.
    "zerank-2": Template(
        ("<|im_start|>system\n", QUERY, "<|im_end|>\n<|im_start|>user\n", PASSAGE,
         "<|im_end|>\n<|im_start|>assistant\n"),
        ("Yes",), temperature=5.0, strips=True, architectures=("Qwen3ForCausalLM",),
    ),
}  # fmt: skip

# The name that `kind` gives to the template of Qwen3-Reranker, and all names.
QWEN3_RERANKER = "qwen3-reranker"
KINDS = ", ".join((QWEN3_RERANKER, *TEMPLATES))


def find_template(name: str, folder: Path, kind: str) -> Template:
    """Return the template of a kind; raises `StartupError` for another kind of model."""
    template = TEMPLATES[kind]
    architecture, *_ = read_config(transformer_folder(folder)).get("architectures") or [""]
    if architecture not in template.architectures:
        raise StartupError(
            f"{name} is a {architecture}, and kind={kind} is for a "
            f"{' or '.join(template.architectures)}"
        )
    return template


def has_scores(folder: Path) -> bool:
    """Return whether a module of sentence-transformers makes scores of a model's logits."""
    return any(module.kind == _LOGIT_SCORE for module in read_modules(folder))


def read_template(folder: Path) -> Template:
    """Read the chat template of a folder with `LogitScore`, and the tokens that it compares.

    Raises `StartupError` if it cannot be followed exactly.
    """
    require_known_modules(folder, "Transformer", _LOGIT_SCORE)
    texts = TextOptions.read(transformer_folder(folder), LANGUAGE)
    if texts.message_format is None:
        raise StartupError(
            f"{folder} holds a language model that reads pairs without a chat template, which is "
            f"not supported; if it is one of these, set its kind: {KINDS}"
        )
    template = read_chat_template(folder, texts)
    return replace(template, answers=read_answers(folder))


def read_answers(folder: Path) -> tuple[int, ...]:
    """Read the tokens that `LogitScore` compares: one, or two whose logits are subtracted."""
    (scores,) = (module.folder for module in read_modules(folder) if module.kind == _LOGIT_SCORE)
    config, names = read_config(scores), ["true_token_id"]
    if (feature := config.get("module_input_name", _LOGITS)) != _LOGITS:
        raise StartupError(f"{scores} works on {feature}; supported here: {_LOGITS}")
    if config.get("false_token_id") is not None:
        names.append("false_token_id")
    return tuple(read_integer(scores, config, name, least=0) for name in names)


def read_chat_template(folder: Path, texts: TextOptions) -> Template:
    """Read the chat template of a folder as a template for pairs.

    sentence-transformers renders a pair as a message of the query and one of the document, and an
    instruction as that of the system. Raises `StartupError` if the template does not repeat each
    text once, as it is or without the spaces around it.
    """
    transformer = transformer_folder(folder)
    chat = ChatTemplate.read(transformer, texts.message_format or "auto", texts.template_options)
    if chat is None or (transformer / "processor_config.json").is_file():
        raise StartupError(f"{folder} has no chat template for pairs of texts")
    pair = (("query", QUERY), ("document", PASSAGE))
    instructed = (("system", INSTRUCTION), *pair)
    rendered, rendered_instructed = chat.render(*pair), chat.render(*instructed)
    default = read_default_prompt(folder) or None
    reads_instruction = INSTRUCTION in rendered_instructed
    strips = set[bool]()
    for text, messages in ((rendered, pair), (rendered_instructed, instructed)):
        is_carried = text.count(QUERY) == text.count(PASSAGE) == 1
        for examples in (_EXAMPLES, dict.fromkeys(_EXAMPLES, "")):
            tried = chat.render(*((role, examples[marker]) for role, marker in messages))
            stripped = {marker: example.strip() for marker, example in examples.items()}
            strips.add(tried != _fill(text, examples))
            is_carried &= tried in {_fill(text, examples), _fill(text, stripped)}
        if not is_carried:
            raise StartupError(
                f"the chat template in {folder} does not repeat the query and the document of a "
                "pair once each, as they are or without the spaces around them"
            )
    if default and not reads_instruction:
        rendered = rendered_instructed
    return Template(
        (rendered,),
        instructed=(rendered_instructed,) if reads_instruction else (),
        default_instruction=default if reads_instruction else None,
        strips=any(strips),
    )


def _fill(part: str, texts: Mapping[str, str]) -> str:
    return "".join(texts.get(piece, piece) for piece in _MARKERS.split(part))


class _Tokens(NamedTuple):
    """The tokens of a filled-in part, and the range of those of each text in it.

    `stops` has the character behind each token, `starts` the first character of each text.
    """

    ids: TokenIds
    stops: TokenIds = NO_IDS
    starts: Mapping[str, int] = {}
    ranges: Mapping[str, range] = {}

    def count_characters(self, marker: str, tokens: int) -> int:
        """Return how many characters of a text its first tokens have."""
        last = self.ranges[marker].start + tokens - 1
        return max(0, int(self.stops[last]) - self.starts[marker]) if tokens else 0


class PairPrompt:
    """Fills pairs into a template, which is never cut."""

    def __init__(self, template: Template, tokenizer: TextTokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        special = tokenizer.special_tokens if template.has_special_tokens else ([], [])
        self._begin, self._end = (
            np.array([token.id for token in tokens], np.int64) for tokens in special
        )
        if self._tokenize_around({}, template.parts)[1] < 2:  # noqa: PLR2004 - one of each text
            raise StartupError(
                f"a length limit of {tokenizer.max_length} tokens leaves no room beside the "
                "reranker's template"
            )

    def fill(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Make a pair of the query with each passage.

        The query is cut to three quarters of the room that the template leaves, and each passage to
        the rest.
        """
        template, limit = self._template, self._tokenizer.max_length
        instruction = instruction or template.default_instruction
        parts = template.instructed if instruction and template.instructed else template.parts
        if template.strips:
            query, instruction = query.strip(), instruction and instruction.strip()
            passages = [passage.strip() for passage in passages]
        texts = {QUERY: cut_text(query, limit), INSTRUCTION: instruction or ""}
        around, room = self._tokenize_around(texts, parts)
        index = next(index for index, part in enumerate(parts) if PASSAGE in part)
        counts = {
            marker: len(found) for tokens in around for marker, found in tokens.ranges.items()
        }
        asked, told = counts[QUERY], counts.get(INSTRUCTION, 0)
        if told > (room + told) // 4:
            raise InvalidRequestError(
                f"the instruction has more than the {(room + told) // 4} tokens that it may have"
            )
        query_kept = min(asked, room * 3 // 4)
        query_exact = len(texts[QUERY]) == len(query)
        if query_kept < asked:  # The rest is not tokenized again beside each passage.
            (filled,) = (tokens for tokens in around if QUERY in tokens.ranges)
            texts[QUERY] = query[: filled.count_characters(QUERY, query_kept)]
        head = np.concatenate((self._begin, *_cut(around[:index], {QUERY: query_kept})))
        pairs = []
        for passage in passages:
            cut_passage = cut_text(passage, limit, truncation.side)
            filled = self._tokenize(parts[index], texts | {PASSAGE: cut_passage})
            found = len(filled.ranges[PASSAGE])
            kept = {QUERY: query_kept, PASSAGE: 0}
            rest = [filled, *around[index + 1 :]]
            fixed = len(head) + sum(map(len, _cut(rest, kept))) + len(self._end)
            kept[PASSAGE] = max(0, min(found, limit - fixed))
            if truncation.max_tokens is not None:
                kept[PASSAGE] = min(kept[PASSAGE], truncation.max_tokens)
            ids = np.concatenate((*_cut(rest, kept, truncation.side), self._end))
            exact = len(cut_passage) == len(passage)
            pairs.append(
                TokenizedPair(
                    sequence=JoinedIds(head, ids),
                    query_tokens=asked + (not query_exact),
                    query_kept=query_kept,
                    passage_tokens=found + (not exact),
                    passage_kept=kept[PASSAGE],
                    query_exact=query_exact,
                    passage_exact=exact,
                )
            )
        return pairs

    def _tokenize_around(
        self, texts: Mapping[str, str], parts: Sequence[str]
    ) -> tuple[list[_Tokens], int]:
        """Tokenize parts without a passage; return the room for the query and a passage, too."""
        filled = {QUERY: "", PASSAGE: "", INSTRUCTION: "", **texts}
        around = [self._tokenize(part, filled) for part in parts]
        fixed = sum(map(len, _cut(around, {QUERY: 0}))) + len(self._begin) + len(self._end)
        return around, self._tokenizer.max_length - fixed

    def _tokenize(self, part: str, texts: Mapping[str, str]) -> _Tokens:
        """Tokenize a part with these texts.

        A token that begins before a text is the text's, one that ends behind it is the part's.
        A `<bos>` that the vocabulary lacks is left out.
        """
        if part == "<bos>" and self._tokenizer.token_id(part) is None:
            return _Tokens(NO_IDS)
        filled, text_starts = "", {}
        for piece in _MARKERS.split(part):
            if piece in texts:
                text_starts[piece] = len(filled)
            filled += texts.get(piece, piece)
        spans = list(self._tokenizer.spans(filled))
        ids = np.concatenate([NO_IDS, *(span.ids for span in spans)])
        stops = np.concatenate([NO_IDS, *(span.stops for span in spans)])
        ranges = {}
        for marker, start in text_starts.items():
            ends = start, start + len(texts[marker])
            first, behind = map(int, np.searchsorted(stops, ends, "right"))
            ranges[marker] = range(first, max(first, behind))
        return _Tokens(ids, stops, text_starts, ranges)


def _cut(
    tokens: Iterable[_Tokens], kept: Mapping[str, int], side: Side = "right"
) -> list[TokenIds]:
    """Return the ids of each part, with `kept` tokens of a text; cut passages on `side`."""
    cut = []
    for part in tokens:
        is_kept = np.ones(len(part.ids), bool)
        for marker, found in part.ranges.items():
            dropped = max(0, len(found) - kept.get(marker, len(found)))
            if marker == PASSAGE and side == "left":
                is_kept[found.start : found.start + dropped] = False
            else:
                is_kept[found.stop - dropped : found.stop] = False
        cut.append(part.ids[is_kept])
    return cut


class TemplateReranker(RerankingModel):
    """Implements `interface.Reranker` by a template."""

    _end: End | None = "last"
    always_normalizes = False

    def __init__(
        self, name: str, folder: Path, max_length: int, target: Target, template: Template
    ) -> None:
        """Load the model; raises `StartupError` if its logits are not computed as here."""
        require_known_modules(folder, "Transformer", _LOGIT_SCORE)
        transformer = transformer_folder(folder)
        config, weights = read_config(transformer), Weights.read(transformer)
        model_type = config.get("model_type")
        has_steps = "lm_head.bias" in weights or config.get("final_logit_softcapping") is not None
        if model_type not in PLAIN_HEADS or has_steps:
            raise StartupError(
                f"{name} is a language model of type {model_type}, whose logits are not supported "
                f"for a reranker; those of {', '.join(sorted(PLAIN_HEADS))} are"
            )
        texts = TextOptions.read(transformer, LANGUAGE if has_scores(folder) else STATES)
        backbone, tokenizer = load_backbone(
            transformer, target, max_length, replace(texts, message_format=None), weights=weights
        )
        super().__init__(name, backbone, tokenizer)
        self._fill = PairPrompt(template, tokenizer).fill
        self.reads_instruction = bool(template.instructed)
        self.temperature = template.temperature
        self._answer = place_answers(backbone, weights, tokenizer, template.answers)
        self._output_specs = {SCORE: OutputSpec("last", 1, steps="answer", reading=repr(template))}

    def _logits(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        return self._answer(last(hidden, packed)).squeeze(1)  # type: ignore[no-any-return]


def place_answers(
    backbone: Backbone, weights: Weights, tokenizer: TextTokenizer, answers: Sequence[str | int]
) -> nn.Module:
    """Place the rows of the language model's head for the answers on the device, subtracted."""
    first, *second = (_read_row(weights, tokenizer, answer) for answer in answers)
    row = first - second[0] if second else first
    return backbone.place_head(make_linear(row[None], None), torch.float32)


def _read_row(weights: Weights, tokenizer: TextTokenizer, token: str | int) -> Tensor:
    """Read the row of the language model's head for one token, in float32.

    If the file has a head, it is used even if the configuration says that it is the embedding.
    """
    if isinstance(token, str):
        ids = tokenizer.encode_plain([token], 2)[0].ids
        if len(ids) != 1:
            raise StartupError(f"the vocabulary in {weights.folder} has no token {token}")
        token = int(ids[0])
    config, tensors, name = read_config(weights.folder), weights, _HEAD
    is_tied = config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT)
    if _HEAD not in weights and is_tied:
        tensors, name = weights.with_prefix_of(_TOKENS), _TOKENS
    rows, width = tensors.shape(name, 2)
    if token >= rows:
        raise StartupError(f"the head of the model in {weights.folder} has no token {token}")
    return tensors.row(name, token, rows, width).float()

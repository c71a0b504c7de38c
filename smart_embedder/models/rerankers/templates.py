"""Prompts with which language models rerank: those that `kind` names, or the folder's own.

The score of a pair is the logit of one token behind the filled-in template, or the difference of
two.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from smart_embedder.errors import StartupError
from smart_embedder.models.families.registry import is_qwen3
from smart_embedder.models.files.chat_template import ChatTemplate
from smart_embedder.models.files.config import (
    LANGUAGE,
    POOLING_FOLDER,
    TextOptions,
    has_module,
    read_architecture,
    read_config,
    read_default_prompt,
    read_integer,
    read_modules,
    require_known_modules,
    transformer_folder,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION
from smart_embedder.models.heads.pooling import require_vector
from smart_embedder.models.tokenizer import NO_LIMIT, TextTokenizer

# Where a template has the texts: characters for private use, which no template has otherwise.
QUERY, PASSAGE, INSTRUCTION = "\ue000", "\ue001", "\ue002"
MARKERS = re.compile(f"([{QUERY}{PASSAGE}{INSTRUCTION}])")
# The module that makes scores of a language model's logits.
LOGIT_SCORE = "LogitScore"
# A language model's head, the embeddings of its tokens, and the prefix of its body.
HEAD, TOKENS, _BODY = "lm_head.weight", "embed_tokens.weight", "model."
# The rows of Qwen3-Reranker's head, and the head of a checkpoint for classification.
_PUBLISHED_ROWS = 151_669
_CLASSIFIER = "score.weight"


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


# The prompt of Qwen3-Reranker, from its model card.
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
BEHIND_QUERY = "\n<Document>:"
_QWEN = f"{PREFIX}<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}{BEHIND_QUERY} {PASSAGE}{SUFFIX}"
QWEN3_RERANKER = Template(
    (_QWEN.replace(INSTRUCTION, DEFAULT_INSTRUCTION),), ("yes", "no"), instructed=(_QWEN,),
    architectures=("Qwen3ForCausalLM",),
)  # fmt: skip
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
    "qwen3-reranker": QWEN3_RERANKER,
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

KINDS = ", ".join(TEMPLATES)


def choose_template(name: str, folder: Path, kind: str | None) -> Template | None:
    """Return the template of a language model: that of its `kind`, or the one its files name.

    None for other rerankers. Raises `StartupError` for a `kind` of other models, and for a folder
    whose own template cannot be followed exactly.
    """
    architecture, has_scores = read_architecture(folder), has_module(folder, LOGIT_SCORE)
    if kind in TEMPLATES:
        template = TEMPLATES[kind]
        if architecture not in {"", *template.architectures}:
            raise StartupError(
                f"{name} is a {architecture}, and kind={kind} is for a "
                f"{' or '.join(template.architectures)}"
            )
    elif kind is not None:
        if architecture.endswith("ForCausalLM"):
            raise StartupError(
                f"kind={kind} is unknown for {name}, a language model: known are {KINDS}"
            )
        return None
    elif has_scores:
        require_known_modules(folder, "Transformer", LOGIT_SCORE)
        own = read_chat_template(folder, LANGUAGE)
        if own is None:
            raise StartupError(
                f"{folder} holds a language model that reads pairs without a chat template, which "
                f"is not supported; if it is one of these, set its kind: {KINDS}"
            )
        template = own
    elif _is_published_qwen3(folder):
        template = QWEN3_RERANKER
    else:
        return None
    if has_scores and (kind is None or template is QWEN3_RERANKER):
        template = replace(template, answers=_read_answers(folder))
    return template


def is_qwen3_reranker(template: Template) -> bool:
    """Return whether a template makes the prompts of Qwen3-Reranker."""
    prompts = QWEN3_RERANKER.parts, QWEN3_RERANKER.instructed
    is_default = template.default_instruction in {None, DEFAULT_INSTRUCTION}
    return is_default and (template.parts, template.instructed) == prompts


def _is_published_qwen3(folder: Path) -> bool:
    """Return whether a Qwen3 has the architecture, head and vocabulary of Qwen3-Reranker.

    Other language models of this type have unused rows in their vocabulary.
    """
    transformer = transformer_folder(folder)
    known = {"", *QWEN3_RERANKER.architectures}
    if not is_qwen3(folder) or read_architecture(folder) not in known:
        return False
    weights, rows = Weights.read(transformer), read_config(transformer).get("vocab_size")
    if not has_language_head(folder, weights) or _CLASSIFIER in weights:
        return False
    tokenizer = TextTokenizer.from_folder(transformer, NO_LIMIT)
    return rows in {_PUBLISHED_ROWS, tokenizer.vocabulary_size}


def has_language_head(folder: Path, weights: Weights) -> bool:
    """Return whether these are the weights of a language model, and not of its body alone."""
    is_embedder = (folder / POOLING_FOLDER).is_dir()
    has_head = HEAD in weights or weights.with_prefix_of(TOKENS).prefix == _BODY
    return has_head and not is_embedder


def _read_answers(folder: Path) -> tuple[int, ...]:
    """Read the tokens that `LogitScore` compares: one, or two whose logits are subtracted."""
    (scores,) = (module.folder for module in read_modules(folder) if module.kind == LOGIT_SCORE)
    require_vector(scores, "causal_logits")
    config, names = read_config(scores), ["true_token_id"]
    if config.get("false_token_id") is not None:
        names.append("false_token_id")
    return tuple(read_integer(scores, config, name, least=0) for name in names)


def read_chat_template(folder: Path, task: tuple[str, str]) -> Template | None:
    """Read the chat template with which sentence-transformers would read pairs, if it would.

    It renders a pair as a message of the query and one of the document, and an instruction as that
    of the system. Raises `StartupError` if the template does not repeat them.
    """
    transformer, modules = transformer_folder(folder), read_modules(folder)
    texts = TextOptions.read(transformer, task) if modules else TextOptions(message_format="auto")
    if texts.message_format is None:
        return None
    chat = ChatTemplate.read(transformer, texts.message_format, texts.template_options)
    if chat is None and not modules:
        return None
    if chat is None or (transformer / "processor_config.json").is_file():
        raise StartupError(f"{folder} has no chat template for pairs of texts")
    pair = (("query", QUERY), ("document", PASSAGE))
    rendered, strips = chat.follow(*pair, may_strip=True)
    instructed, strips_instructed = chat.follow(("system", INSTRUCTION), *pair, may_strip=True)
    reads_instruction = INSTRUCTION in instructed
    default = read_default_prompt(folder) or None
    if default and not reads_instruction:
        rendered = instructed
    return Template(
        (rendered,),
        instructed=(instructed,) if reads_instruction else (),
        default_instruction=default if reads_instruction else None,
        strips=strips or strips_instructed,
    )

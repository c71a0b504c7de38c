"""Language models that rerank with a template of their own, which `kind` names.

Their reference programs tokenize the parts of a template one by one, and so does this.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from smart_embedder.errors import InvalidRequestError, StartupError
from smart_embedder.kernels.backend import make_linear
from smart_embedder.kernels.packed_batch import End, PackedBatch
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.config import TextOptions, read_config
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.pooling import last
from smart_embedder.models.runner import OutputSpec, RerankingModel
from smart_embedder.requests import CUT_AT_END, TruncationOptions
from smart_embedder.tokens import JoinedIds, TokenizedPair
from smart_embedder.vector_space import SCORE

_HEAD, _TOKENS = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Template:
    """The parts of a prompt in their order, and how its score is made.

    The query follows `query`, the passage follows `passage`, and an instruction, if the model reads
    one, follows `instruction`. The score is the logit of the token `yes` minus that of `no`.
    """

    architecture: str
    before: tuple[str, ...]
    query: str
    between: tuple[str, ...]
    passage: str
    behind: tuple[str, ...]
    yes: str
    no: str | None = None
    instruction: str | None = None
    temperature: float = 1.0
    strips: bool = False


TEMPLATES = {
    # FlagLLMReranker of FlagEmbedding.
    "bge-reranker-v2-gemma": Template(
        "GemmaForCausalLM", ("<bos>",), "A: ", ("\n",), "B: ",
        ("\n", ("Given a query A and a passage B, determine whether the passage contains an answer "
         "to the query by providing a prediction of either 'Yes' or 'No'.")),
        "Yes",
    ),
    # The package mxbai-rerank.
    "mxbai-rerank-v2": Template(
        "Qwen2ForCausalLM",
        (("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
         "<|im_end|>\n<|im_start|>user\n"),),
        "query: ", ("\n",), "document: ",
        ("\n", ("You are a search relevance expert who evaluates how well documents match search "
         "queries. For each query-document pair, carefully analyze the semantic relationship "
         "between them, then provide your binary relevance judgment (0 for not relevant, 1 for "
         "relevant).\nRelevance:"), "<|im_end|>\n<|im_start|>assistant\n"),
        "1", "0", instruction="instruction: ",
    ),
    # Its model card: Qwen3's chat template, with the query as the system's message.
    "zerank-2": Template(
        "Qwen3ForCausalLM", ("<|im_start|>system\n",), "", ("<|im_end|>\n<|im_start|>user\n",), "",
        ("<|im_end|>\n<|im_start|>assistant\n",), "Yes", temperature=5.0, strips=True,
    ),
}  # fmt: skip


class TemplateReranker(RerankingModel):
    """Implements `interface.Reranker` by the template of `kind`."""

    _end: End | None = "last"
    always_normalizes = False

    def __init__(
        self, name: str, folder: Path, max_length: int, target: Target, *, kind: str
    ) -> None:
        """Load the model; raises `StartupError` if it is none of that kind."""
        self._template = template = TEMPLATES[kind]
        config, weights = read_config(folder), Weights.read(folder)
        (architecture,) = config.get("architectures") or [""]
        if architecture != template.architecture:
            raise StartupError(
                f"{name} is a {architecture}, and kind={kind} is for a {template.architecture}"
            )
        texts = TextOptions.read(folder)
        backbone, tokenizer = load_backbone(folder, target, max_length, texts, weights=weights)
        super().__init__(name, backbone, tokenizer)
        self.reads_instruction = template.instruction is not None
        self.temperature = template.temperature
        fixed = [
            [part for part in parts if part != "<bos>" or tokenizer.token_id(part) is not None]
            for parts in (template.before, template.between, template.behind)
        ]
        self._before, self._between, self._behind = (
            list(chain.from_iterable(text.ids for text in tokenizer.encode_plain(parts, 1000)))
            for parts in fixed
        )
        self._labels = [
            len(tokenizer.encode_plain([label.rstrip()], 1000)[0].ids)
            for label in (template.query, template.passage)
        ]
        self._room = self.max_length - len([*self._before, *self._between, *self._behind])
        if self._room < 2:  # noqa: PLR2004 - a token of the query and one of the passage
            raise StartupError(f"a length limit of {self.max_length} is too short for {kind}")
        row = self._read_row(weights, template.yes)
        if template.no is not None:
            row = row - self._read_row(weights, template.no)
        self._answer = backbone.place_head(make_linear(row[None], None), torch.float32)
        self._output_specs = {SCORE: OutputSpec("last", 1, steps="answer", reading=repr(template))}

    def _read_row(self, weights: Weights, token: str) -> Tensor:
        """Read the row of the language model's head for the answer, which is one token."""
        ids = self._tokenizer.encode_plain([token], 2)[0].ids
        if len(ids) != 1:
            raise StartupError(f"the vocabulary in {weights.folder} has no token {token}")
        tensors, name = weights, _HEAD
        if _HEAD not in weights:  # It is the table of embeddings.
            tensors, name = weights.with_prefix_of(_TOKENS), _TOKENS
        shape = tensors.tensors[tensors.prefix + name].shape
        return tensors.row(name, int(ids[0]), *shape).float()

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Fill in the template: the query is cut to three quarters, each passage to the rest."""
        template, tokenizer = self._template, self._tokenizer
        if template.strips:
            query, passages = query.strip(), [passage.strip() for passage in passages]
        before, room = self._before, self._room
        if instruction is not None and template.instruction is not None:
            parts = [template.instruction + instruction, "\n"]
            encoded = tokenizer.encode_plain(parts, room // 4)
            if any(text.total > text.kept for text in encoded):
                raise InvalidRequestError(
                    f"the instruction has more than the {room // 4} tokens that it may have"
                )
            before = [*before, *chain.from_iterable(text.ids for text in encoded)]
            room -= sum(text.kept for text in encoded)
        (asked,) = tokenizer.encode_plain([template.query + query], room * 3 // 4)
        head = np.concatenate((np.array(before, np.int64), asked.ids))
        limit = room - asked.kept
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens + self._labels[1])
        texts = tokenizer.encode_plain(passages, limit, truncation.side, template.passage)
        pairs = []
        for text in texts:
            ids = np.concatenate((self._between, text.ids, self._behind)).astype(np.int64)
            pairs.append(
                TokenizedPair(
                    sequence=JoinedIds(head, ids),
                    query_tokens=max(0, asked.total - self._labels[0]),
                    query_kept=max(0, asked.kept - self._labels[0]),
                    passage_tokens=max(0, text.total - self._labels[1]),
                    passage_kept=max(0, text.kept - self._labels[1]),
                    query_exact=asked.exact,
                    passage_exact=text.exact,
                )
            )
        return pairs

    def _logits(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        return self._answer(last(hidden, packed)).squeeze(1)  # type: ignore[no-any-return]

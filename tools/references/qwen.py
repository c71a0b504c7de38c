"""transformers, as the model cards of Qwen3-Embedding and Qwen3-Reranker use it.

Written for plainness: one left-padded batch after the other, in float32.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from smart_embedder.engine.records import NO_OPTIONS, EmbeddingOptions, FloatArray, TextEmbedding
from smart_embedder.models.checkpoint.config import read_prompts
from smart_embedder.models.tasks.dense import QWEN_END
from smart_embedder.models.tasks.qwen3 import DEFAULT_INSTRUCTION, PREFIX, SUFFIX
from tools.references.reference import BATCH, prompt_of

PACKAGE = "transformers"
# The model card's, for a folder without sentence-transformers' configuration.
_PROMPTS = {"query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:"}


class QwenEmbedding:
    """The last token's state."""

    package = PACKAGE

    def __init__(self, folder: Path, max_length: int, device: str = "cpu") -> None:
        self._tokenizer, self._model = _loaded(AutoModel, folder, device)
        self._prompts: Mapping[str, str] = read_prompts(folder) or _PROMPTS
        self._max_length = max_length

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """As `EmbeddingReference.embed`; vectors are raw."""
        prompt = prompt_of(self._prompts, options)
        states = self.states([prompt + text for text in texts])
        return [TextEmbedding(dense=state) for state in states]

    def states(self, texts: list[str]) -> FloatArray:
        """`[N, width]`, each text closed by one end token."""
        tokenizer = self._tokenizer
        end = tokenizer.convert_tokens_to_ids(QWEN_END)
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        rows = [[*each[: self._max_length - 1], end] for each in ids]
        states = [output.last_hidden_state[:, -1] for output in padded(self._model, rows)]
        return np.asarray(torch.cat(states).cpu(), np.float32)


class QwenReranker:
    """The probability of yes, from the whole vocabulary's logits."""

    package = PACKAGE

    def __init__(self, folder: Path, max_length: int, device: str = "cpu") -> None:
        self._tokenizer, self._model = _loaded(AutoModelForCausalLM, folder, device)
        self._max_length = max_length

    def scores(
        self, query: str, passages: list[str], instruction: str = DEFAULT_INSTRUCTION
    ) -> list[float]:
        """As `RerankingReference.scores`."""
        rows = qwen_rows(self._tokenizer, query, passages, self._max_length, instruction)
        answers = yes_and_no(self._tokenizer)
        logits = [output.logits[:, -1, answers] for output in padded(self._model, rows)]
        scores: list[float] = torch.cat(logits).softmax(dim=1)[:, 0].tolist()
        return scores


def yes_and_no(tokenizer: Any) -> list[int]:
    """The ids of the two answers."""
    return [tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no")]


def qwen_rows(
    tokenizer: Any, query: str, passages: list[str], max_length: int, instruction: str
) -> list[list[int]]:
    """The model card's template filled in, token ids."""
    prefix = tokenizer.encode(PREFIX, add_special_tokens=False)
    suffix = tokenizer.encode(SUFFIX, add_special_tokens=False)
    room = max_length - len(prefix) - len(suffix)
    head = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
    contents = [
        tokenizer(head + passage, add_special_tokens=False)["input_ids"] for passage in passages
    ]
    return [prefix + content[:room] + suffix for content in contents]


def padded(model: Any, rows: list[list[int]], **inputs: Any) -> Iterator[Any]:
    """Transformers' own forward over left-padded batches."""
    for begin in range(0, len(rows), BATCH):
        batch = rows[begin : begin + BATCH]
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        named = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        on_device = {name: each.to(model.device) for name, each in named.items()}
        with torch.inference_mode():
            yield model(**on_device, **inputs)


def _loaded(kind: Any, folder: Path, device: str) -> tuple[Any, Any]:
    """The tokenizer and the model in float32."""
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return AutoTokenizer.from_pretrained(folder), model.to(device).eval()

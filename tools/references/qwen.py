"""transformers, used as in the model cards of Qwen3-Embedding and Qwen3-Reranker.

Batches are left-padded and run one after the other, in float32.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from smart_embedder.models.files.config import read_prompts
from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION, QWEN_END
from smart_embedder.models.rerankers.templates import PREFIX, SUFFIX
from smart_embedder.requests import NO_OPTIONS, EmbeddingOptions
from smart_embedder.results import FloatArray, TextEmbedding
from tools.references.reference import BATCH, prompt_of

PACKAGE = "transformers"
# From the model card, for a folder without sentence-transformers' configuration.
_PROMPTS = {"query": f"Instruct: {DEFAULT_INSTRUCTION}\nQuery:"}


class QwenEmbedding:
    """The state of the last token."""

    package = PACKAGE

    def __init__(self, folder: Path, max_length: int) -> None:
        self._tokenizer, self._model = _load(AutoModel, folder)
        self._prompts: Mapping[str, str] = read_prompts(folder) or _PROMPTS
        self._max_length = max_length

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """Embed texts as `EmbeddingReference.embed`; vectors are not normalised."""
        prompt = prompt_of(self._prompts, options)
        states = self.states([prompt + text for text in texts])
        return [TextEmbedding(dense=state) for state in states]

    def states(self, texts: list[str]) -> FloatArray:
        """Return the states `[N, width]`; one end token follows each text."""
        tokenizer = self._tokenizer
        end = tokenizer.convert_tokens_to_ids(QWEN_END)
        encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        rows = [[*ids[: self._max_length - 1], end] for ids in encoded]
        return _read_last_tokens(
            tokenizer, self._model, rows, lambda output: output.last_hidden_state[:, -1]
        ).numpy()


class QwenReranker:
    """The probability of yes, from the logits of the last token."""

    package = PACKAGE

    def __init__(self, folder: Path, max_length: int) -> None:
        self._tokenizer, self._model = _load(AutoModelForCausalLM, folder)
        self._answers = [self._tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no")]
        self._max_length = max_length

    def scores(
        self, query: str, passages: list[str], instruction: str = DEFAULT_INSTRUCTION
    ) -> list[float]:
        """Score passages as `RerankingReference.scores`."""
        rows = self._rows(query, passages, instruction)
        logits = _read_last_tokens(
            self._tokenizer, self._model, rows, lambda output: output.logits[:, -1, self._answers]
        )
        scores: list[float] = logits.softmax(dim=1)[:, 0].tolist()
        return scores

    def _rows(self, query: str, passages: list[str], instruction: str) -> list[list[int]]:
        """Return the token ids of the model card's template for each passage."""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        prefix, suffix = encode(PREFIX), encode(SUFFIX)
        limit = self._max_length - len(prefix) - len(suffix)
        head = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
        return [prefix + encode(head + passage)[:limit] + suffix for passage in passages]


def _read_last_tokens(
    tokenizer: Any, model: Any, rows: list[list[int]], read: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """Run the model on left-padded batches, and `read` its output at each row's last token.

    Batches hold rows of similar length; the result is float32, in the order of the rows.
    """
    order = torch.tensor([len(row) for row in rows]).argsort()
    found = []
    for indices in torch.split(order, BATCH):
        ids = {"input_ids": [rows[index] for index in indices]}
        batch = tokenizer.pad(ids, padding_side="left", return_tensors="pt").to(model.device)
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.inference_mode():
            found.append(read(model(**batch, position_ids=positions)).float().cpu())
    return torch.cat(found)[order.argsort()]


def _load(model_class: Any, folder: Path) -> tuple[Any, Any]:
    """Load the tokenizer and the model."""
    model = model_class.from_pretrained(folder, dtype="float32", attn_implementation="sdpa")
    return AutoTokenizer.from_pretrained(folder), model.eval()

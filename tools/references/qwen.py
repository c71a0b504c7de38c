"""transformers, as the model cards of Qwen3-Embedding and Qwen3-Reranker use it.

Written for plainness: one left-padded batch after the other, in float32.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from smart_embedder.models.files.config import read_prompts
from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION, QWEN_END
from smart_embedder.models.rerankers.llm import PREFIX, SUFFIX
from smart_embedder.requests import NO_OPTIONS, EmbeddingOptions
from smart_embedder.results import FloatArray, TextEmbedding
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
        return _last(
            tokenizer, self._model, rows, lambda output: output.last_hidden_state[:, -1]
        ).numpy()


class QwenReranker:
    """The probability of yes, from the logits of the last token."""

    def __init__(
        self, folder: Path, max_length: int, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        self.package = f"{PACKAGE} {dtype}" if dtype != "float32" else PACKAGE
        self._tokenizer, self._model = _loaded(AutoModelForCausalLM, folder, device, dtype)
        self._answers = [self._tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no")]
        self._max_length = max_length

    def scores(
        self, query: str, passages: list[str], instruction: str = DEFAULT_INSTRUCTION
    ) -> list[float]:
        """As `RerankingReference.scores`."""
        rows = self._rows(query, passages, instruction)
        logits = _last(
            self._tokenizer, self._model, rows, lambda output: output.logits[:, -1, self._answers]
        )
        scores: list[float] = logits.softmax(dim=1)[:, 0].tolist()
        return scores

    def _rows(self, query: str, passages: list[str], instruction: str) -> list[list[int]]:
        """The model card's template filled in, token ids."""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        prefix, suffix = encode(PREFIX), encode(SUFFIX)
        room = self._max_length - len(prefix) - len(suffix)
        head = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
        return [prefix + encode(head + passage)[:room] + suffix for passage in passages]


def _last(
    tokenizer: Any, model: Any, rows: list[list[int]], read: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """What is read of each row's last token, by transformers' own forward.

    Over left-padded batches of near lengths; float32, in the order of the rows.
    """
    order = torch.tensor([len(row) for row in rows]).argsort()
    found = []
    for places in torch.split(order, BATCH):
        ids = {"input_ids": [rows[place] for place in places]}
        batch = tokenizer.pad(ids, padding_side="left", return_tensors="pt").to(model.device)
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.inference_mode():
            found.append(read(model(**batch, position_ids=positions)).float().cpu())
    return torch.cat(found)[order.argsort()]


def _loaded(kind: Any, folder: Path, device: str, dtype: str = "float32") -> tuple[Any, Any]:
    """The tokenizer and the model."""
    model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return AutoTokenizer.from_pretrained(folder), model.to(device).eval()

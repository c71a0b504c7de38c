"""FlagEmbedding, for bge-m3 and bge-reranker-v2-m3."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from FlagEmbedding import BGEM3FlagModel, FlagReranker

from smart_embedder.models.files.config import read_pooling, read_prompts
from smart_embedder.requests import NO_OPTIONS, EmbeddingOptions
from smart_embedder.results import SparseVector, TextEmbedding
from tools.references.reference import BATCH, prompt_of


class M3:
    """`BGEM3FlagModel`."""

    package = "FlagEmbedding"

    def __init__(self, folder: Path, max_length: int, device: str) -> None:
        pooling = read_pooling(folder)
        self._model = BGEM3FlagModel(
            str(folder), use_fp16=False, devices=device, pooling_method=pooling
        )
        self._max_length = max_length
        self._prompts = read_prompts(folder)

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """As `EmbeddingReference.embed`."""
        prompt = prompt_of(self._prompts, options)
        found = self._encode([prompt + text for text in texts])
        # XLM-RoBERTa's separator is its end token, which is dropped; BERT's is dropped here.
        separator = self._model.tokenizer.sep_token_id
        kinds = (found["dense_vecs"], found["lexical_weights"], found["colbert_vecs"])
        made = []
        for dense, named, colbert in zip(*kinds, strict=True):
            weights = {int(key): float(each) for key, each in named.items()}
            weights.pop(separator, None)
            ids = sorted(weights)
            values = np.array([weights[each] for each in ids], np.float32)
            made.append(
                TextEmbedding(
                    np.asarray(dense, np.float32),
                    SparseVector(np.array(ids, np.int64), values),
                    np.asarray(colbert, np.float32),
                )
            )
        return made

    def scores(self, query: str, passages: list[str]) -> list[float]:
        """The mean of the three scores that `BGEM3FlagModel` computes from its own vectors.

        (Its `compute_score` gives the same, but wants a tokenizer with XLM-RoBERTa's special
        tokens.)
        """
        found = self._encode([query, *passages])
        dense, weights, vectors = (
            found[kind] for kind in ("dense_vecs", "lexical_weights", "colbert_vecs")
        )
        return [
            float(
                dense[0] @ dense[place]
                + self._model.compute_lexical_matching_score(weights[0], weights[place])
                + self._model.colbert_score(vectors[0], vectors[place])
            )
            / 3
            for place in range(1, len(passages) + 1)
        ]

    def _encode(self, texts: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = self._model.encode(
            texts,
            batch_size=BATCH,
            max_length=self._max_length,
            return_dense=True,
            return_sparse=True,
            return_colbert_vecs=True,
        )
        return found


class Reranker:
    """`FlagReranker`, for RoBERTa's kind with one label."""

    package = "FlagEmbedding"

    def __init__(self, folder: Path, max_length: int, device: str) -> None:
        self._model = FlagReranker(
            str(folder), use_fp16=False, devices=device, max_length=max_length, batch_size=BATCH
        )
        tokenizer = self._model.tokenizer
        tokenizer.prepare_for_model = partial(_join, tokenizer.bos_token_id, tokenizer.eos_token_id)

    def scores(self, query: str, passages: list[str]) -> list[float]:
        """The raw logits."""
        found = self._model.compute_score([(query, passage) for passage in passages])
        # Of one pair it gives the number by itself.
        return [float(each) for each in np.atleast_1d(found)]


def _join(
    begin: int, end: int, query: Sequence[int], passage: Sequence[int], max_length: int, **_: Any
) -> dict[str, list[int]]:
    """Token ids of a pair, the passage cut; an empty passage is left out.

    FlagReranker asks the tokenizers of transformers 4 for this. Those of transformers 5 lack it,
    and it turns ids into text and that into ids again, which changes some texts.
    """
    head = [begin, *query, end]
    tail = [end, *passage[: max_length - len(head) - 2], end] if passage else []
    return {"input_ids": head + tail, "attention_mask": [1] * len(head + tail)}

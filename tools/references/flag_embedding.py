"""FlagEmbedding, the reference of bge-m3 and bge-reranker-v2-m3."""

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
    """Vectors of `BGEM3FlagModel`."""

    package = "FlagEmbedding"

    def __init__(self, folder: Path, max_length: int) -> None:
        pooling = read_pooling(folder)
        self._model = BGEM3FlagModel(
            str(folder), use_fp16=False, devices="cpu", pooling_method=pooling
        )
        self._max_length = max_length
        self._prompts = read_prompts(folder)

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """Embed texts as `EmbeddingReference.embed`."""
        prompt = prompt_of(self._prompts, options)
        found = self._encode([prompt + text for text in texts])
        # FlagEmbedding drops XLM-RoBERTa's separator, its end token, but not BERT's.
        separator = self._model.tokenizer.sep_token_id
        kinds = (found["dense_vecs"], found["lexical_weights"], found["colbert_vecs"])
        embeddings = []
        for dense, lexical, colbert in zip(*kinds, strict=True):
            weights = {int(key): float(weight) for key, weight in lexical.items()}
            weights.pop(separator, None)
            ids = sorted(weights)
            values = np.array([weights[id_] for id_ in ids], np.float32)
            embeddings.append(
                TextEmbedding(
                    np.asarray(dense, np.float32),
                    SparseVector(np.array(ids, np.int64), values),
                    np.asarray(colbert, np.float32),
                )
            )
        return embeddings

    def scores(self, query: str, passages: list[str]) -> list[float]:
        """Return the mean of the three scores that `BGEM3FlagModel` computes from its vectors.

        `compute_score` returns the same, but needs a tokenizer with XLM-RoBERTa's special tokens.
        """
        found = self._encode([query, *passages])
        dense, weights, vectors = (
            found[kind] for kind in ("dense_vecs", "lexical_weights", "colbert_vecs")
        )
        return [
            float(
                dense[0] @ dense[index]
                + self._model.compute_lexical_matching_score(weights[0], weights[index])
                + self._model.colbert_score(vectors[0], vectors[index])
            )
            / 3
            for index in range(1, len(passages) + 1)
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
    """Scores of `FlagReranker`, for RoBERTa's architecture with one label."""

    package = "FlagEmbedding"

    def __init__(self, folder: Path, max_length: int) -> None:
        self._model = FlagReranker(
            str(folder), use_fp16=False, devices="cpu", max_length=max_length, batch_size=BATCH
        )
        tokenizer = self._model.tokenizer
        tokenizer.prepare_for_model = partial(
            _join_pair, tokenizer.bos_token_id, tokenizer.eos_token_id
        )

    def scores(self, query: str, passages: list[str]) -> list[float]:
        """Return the raw logits."""
        logits = self._model.compute_score([(query, passage) for passage in passages])
        # For one pair FlagReranker returns a number instead of a list.
        return [float(logit) for logit in np.atleast_1d(logits)]


def _join_pair(
    begin: int, end: int, query: Sequence[int], passage: Sequence[int], max_length: int, **_: Any
) -> dict[str, list[int]]:
    """Join the token ids of a pair, with the passage truncated; leave out an empty passage.

    FlagReranker expects this method of tokenizers, which transformers 5 has removed. Without it,
    FlagReranker turns ids into text and back into ids, which changes some texts.
    """
    head = [begin, *query, end]
    tail = [end, *passage[: max_length - len(head) - 2], end] if passage else []
    return {"input_ids": head + tail, "attention_mask": [1] * len(head + tail)}

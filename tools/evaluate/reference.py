"""The reference implementations as a source, on the same weights, in float32."""

import time

import numpy as np

from app.engine.options import NO_OPTIONS, EmbeddingOptions
from app.engine.types import SparseVector, TextEmbedding
from app.models.checkpoint.sentence_config import read_pooling
from app.models.runtime import locate_models
from app.settings import NO_RERANKER, Settings
from tools.evaluate.sources import Embedded, Kinds
from tools.verify import references


class ReferenceSource:
    """FlagEmbedding for bge-m3 and its reranker, transformers for Qwen3."""

    name = "the reference"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folders = locate_models(settings)
        self.reranks = settings.reranker_model != NO_RERANKER

    async def embed(
        self,
        texts: list[str],
        kinds: Kinds | None = None,  # noqa: ARG002 - FlagEmbedding computes all of them
        options: EmbeddingOptions = NO_OPTIONS,
    ) -> Embedded:
        """All kinds, whatever is asked for; the number of tokens is not told."""
        began = time.perf_counter()
        embeddings = self._embed(texts, options.prompt or "")
        return Embedded(embeddings, None, time.perf_counter() - began)

    async def rerank(self, query: str, passages: list[str]) -> list[float]:
        """A score of each passage."""
        return references.rerank_scores(self._settings, self._folders, query, passages)[1]

    def _embed(self, texts: list[str], prompt: str) -> list[TextEmbedding]:
        folder, dense = self._folders.embedding, self._folders.dense
        limit = references.m3_limit(self._settings, folder)
        # The model that makes dense vectors reads the prompt.
        read = texts if dense else [prompt + text for text in texts]
        found = references.m3_vectors(folder, read, limit, read_pooling(folder))
        vectors = found.dense
        if dense is not None:
            limit = self._settings.qwen_embed_max_length
            states = references.qwen_states(dense, [prompt + text for text in texts], limit)
            vectors = states / np.linalg.norm(states, axis=1, keepdims=True)
        return [
            TextEmbedding(*three)
            for three in zip(vectors, map(_sparse, found.sparse), found.colbert, strict=True)
        ]


def _sparse(weights: dict[int, float]) -> SparseVector:
    ids = sorted(weights)
    values = [weights[each] for each in ids]
    return SparseVector(np.array(ids, np.int64), np.array(values, np.float32))

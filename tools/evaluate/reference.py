"""The reference implementations as a source, on the same weights, in float32."""

import time
from dataclasses import replace

import numpy as np

from smart_embedder.engine.records import NO_OPTIONS, EmbeddingOptions, TextEmbedding
from smart_embedder.models.device.choose import choose_device
from smart_embedder.settings import Settings
from tools.evaluate.representations import Kinds
from tools.evaluate.sources import Embedded
from tools.references.choose import References


class ReferenceSource:
    """What `tools.references` has for each model, on the first device of the settings."""

    name = "the reference"

    def __init__(self, settings: Settings) -> None:
        self._references = References(settings, str(choose_device(settings.devices[0])))
        self.reranks = self._references.reranks

    async def embed(
        self,
        texts: list[str],
        kinds: Kinds | None = None,  # noqa: ARG002 - FlagEmbedding computes all of them
        options: EmbeddingOptions = NO_OPTIONS,
    ) -> Embedded:
        """All kinds, whatever is asked for; the number of tokens is not told."""
        began = time.perf_counter()
        embeddings = self._embed(texts, options)
        return Embedded(embeddings, None, time.perf_counter() - began)

    async def rerank(self, query: str, passages: list[str]) -> list[float]:
        """A score of each passage."""
        reranking = self._references.reranking
        return [] if reranking is None else reranking.scores(query, passages)

    def _embed(self, texts: list[str], options: EmbeddingOptions) -> list[TextEmbedding]:
        references = self._references
        if references.dense is None:
            return [_with_unit_dense(each) for each in references.embedding.embed(texts, options)]
        # A prompt is for the model that makes dense vectors.
        typed = EmbeddingOptions(prompt="", input_type=options.input_type)
        others = references.embedding.embed(texts, typed)
        vectors = references.dense.embed(texts, options)
        return [
            _with_unit_dense(replace(rest, dense=own.dense))
            for rest, own in zip(others, vectors, strict=True)
        ]


def _with_unit_dense(made: TextEmbedding) -> TextEmbedding:
    if made.dense is None:
        return made
    return replace(made, dense=made.dense / max(float(np.linalg.norm(made.dense)), 1e-12))

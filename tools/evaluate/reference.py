"""The reference implementations as a source, on the same weights, in float32."""

import time
from dataclasses import replace

import numpy as np

from smart_embedder.engine.records import NO_OPTIONS, EmbeddingOptions
from smart_embedder.models.device.choose import choose_device
from smart_embedder.settings.engine import EngineSettings
from tools.evaluate.representations import Kinds
from tools.evaluate.sources import Embedded
from tools.references.choose import References


class ReferenceSource:
    """What `tools.references` has for each model, on the first device of the settings."""

    name = "the reference"

    def __init__(self, settings: EngineSettings) -> None:
        self._references = References(settings, str(choose_device(settings.devices[0])))
        self.reranks = self._references.reranks

    async def embed(
        self,
        texts: list[str],
        kinds: Kinds | None = None,  # noqa: ARG002 - FlagEmbedding computes all of them
        options: EmbeddingOptions = NO_OPTIONS,
    ) -> Embedded:
        """All kinds, whatever is asked for; the number of tokens is not told."""
        began, references = time.perf_counter(), self._references
        if references.dense is None:
            made = references.embedding.embed(texts, options)
        else:
            # A prompt is for the model that makes dense vectors.
            typed = EmbeddingOptions(prompt="", input_type=options.input_type)
            others = references.embedding.embed(texts, typed)
            vectors = references.dense.embed(texts, options)
            both = zip(others, vectors, strict=True)
            made = [replace(rest, dense=own.dense) for rest, own in both]
        for place, each in enumerate(made):
            if each.dense is not None:
                unit = each.dense / max(float(np.linalg.norm(each.dense)), 1e-12)
                made[place] = replace(each, dense=unit)
        return Embedded(made, None, time.perf_counter() - began)

    async def rerank(self, query: str, passages: list[str]) -> list[float]:
        """A score of each passage."""
        reranking = self._references.reranking
        return [] if reranking is None else reranking.scores(query, passages)

"""What a reference implementation is asked for, whichever package it is of."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from smart_embedder.requests import NO_OPTIONS, EmbeddingOptions
from smart_embedder.results import TextEmbedding

# Texts of one padded forward, where a package's own default would need gigabytes.
BATCH = 8
# Settings for who compares: one request may take as long as it needs, nobody waits for the answer.
PATIENT = {"gpu_process_timeout": 3600.0, "rerank_gpu_timeout": 3600.0}
# As sentence-transformers looks for them.
_PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus"), None: ()}


class ReferenceMissingError(Exception):
    """The package of a reference is not installed; the message is one sentence."""


class EmbeddingReference(Protocol):
    """Embeds texts."""

    package: str

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """Every kind of vectors that the model makes, in float32, as the package gives them.

        Of the options `prompt` and `input_type` count.
        """


@runtime_checkable
class RerankingReference(Protocol):
    """Scores passages for a query."""

    package: str

    def scores(self, query: str, passages: list[str]) -> list[float]:
        """A score of each passage: a logit, or what the service gives in its place."""


def prompt_of(prompts: Mapping[str, str], options: EmbeddingOptions) -> str:
    """What is read before each text, by a model with these `prompts`."""
    if options.prompt is not None:
        return options.prompt
    named = (prompts[name] for name in _PROMPT_NAMES[options.input_type] if name in prompts)
    return next(named, "")

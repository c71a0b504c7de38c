"""The interface of reference implementations."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from smart_embedder.requests import NO_OPTIONS, EmbeddingOptions
from smart_embedder.results import TextEmbedding

# Texts of one padded forward; the packages' own defaults can need gigabytes.
BATCH = 8
# No client waits for the comparison, so that a request may take long.
PATIENT = {"gpu_process_timeout": 3600.0, "rerank_gpu_timeout": 3600.0}
# The names in sentence-transformers' order.
_PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus"), None: ()}


class ReferenceMissingError(Exception):
    """The package of a reference is not installed; the message is one sentence."""


class EmbeddingReference(Protocol):
    """Embeds texts."""

    package: str

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """Return all kinds of vectors of the model, in float32, as the package returns them.

        Only `prompt` and `input_type` of the options are used.
        """


@runtime_checkable
class RerankingReference(Protocol):
    """Scores passages for a query."""

    package: str

    def scores(self, query: str, passages: list[str]) -> list[float]:
        """Return a score for each passage, on the scale of the service's scores."""


def prompt_of(prompts: Mapping[str, str], options: EmbeddingOptions) -> str:
    """Return the prompt before each text for a model with these `prompts`."""
    if options.prompt is not None:
        return options.prompt
    named = (prompts[name] for name in _PROMPT_NAMES[options.input_type] if name in prompts)
    return next(named, "")

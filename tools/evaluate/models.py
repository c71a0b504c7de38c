"""The models of a running service: vectors of texts, and scores of passages."""

from http import HTTPStatus
from typing import Any

from app.formats import SAFETENSORS
from smart_embedder.requests import InputType
from smart_embedder.results import TextEmbedding
from smart_embedder.settings import NO_RERANKER
from tools.answers import embeddings_in
from tools.evaluate.representations import COLBERT, KINDS, SPARSE
from tools.service import EMBED, RERANK, Service

TRIES = 20
LATER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class Models:
    """Those that the service takes by default, or those of MODELS that are named.

    With `input_types` a model reads queries and documents as it was trained to; a ColBERT model
    always does.
    """

    def __init__(
        self, service: Service, model: str | None, reranker: str | None, *, input_types: bool
    ) -> None:
        self._service, self._model, self._reranker = service, model, reranker
        self._input_types = False
        self.reranks = bool(reranker) or service.health["reranker_model"] != NO_RERANKER
        (found,) = self.embed(["a"], frozenset(), "document")
        self.kinds = frozenset(kind for kind in KINDS if getattr(found, kind) is not None)
        # A model of bge-m3's kind makes sparse vectors, too, and reads all texts alike.
        self._input_types = input_types or (COLBERT in self.kinds and SPARSE not in self.kinds)

    def embed(
        self, texts: list[str], kinds: frozenset[str], role: InputType
    ) -> list[TextEmbedding]:
        """The vectors of these kinds, or of all that are made, of unit length."""
        body: dict[str, Any] = {"sentences": texts, "normalize_dense": True, "model": self._model}
        if kinds:
            body |= {f"return_{kind}": kind in kinds for kind in KINDS}
        if self._input_types:
            body["input_type"] = role
        embeddings, _ = embeddings_in(self._service.work(EMBED, body, SAFETENSORS).content)
        return embeddings

    def rerank(self, query: str, passages: list[str]) -> list[float]:
        """A score of each passage."""
        body = {"query": query, "passages": passages, "model": self._reranker}
        results = self._service.work(RERANK, body).json()["results"]
        return [found["score"] for found in sorted(results, key=lambda found: found["index"])]

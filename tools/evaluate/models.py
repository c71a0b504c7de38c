"""The models of a running service: embedding and reranking."""

from http import HTTPStatus
from typing import Any

from app.formats import SAFETENSORS
from smart_embedder.requests import InputType
from smart_embedder.results import TextEmbedding
from smart_embedder.settings import NO_RERANKER
from tools.answers import read_safetensors
from tools.evaluate.representations import COLBERT, KINDS, SPARSE
from tools.service import EMBED, RERANK, Service

ATTEMPTS = 20
RETRY_ON = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class Models:
    """The default models of the service, or the given models of MODELS.

    With `input_types`, requests have `input_type`; for a ColBERT model they always have it.
    """

    def __init__(
        self, service: Service, model: str | None, reranker: str | None, *, input_types: bool
    ) -> None:
        self._service, self._model, self._reranker = service, model, reranker
        self._input_types = False
        self.reranks = bool(reranker) or service.health["reranker_model"] != NO_RERANKER
        (found,) = self.embed(["a"], frozenset(), "document")
        self.kinds = frozenset(kind for kind in KINDS if getattr(found, kind) is not None)
        # Unlike a ColBERT model, bge-m3 also has sparse vectors and no input types.
        self._input_types = input_types or (COLBERT in self.kinds and SPARSE not in self.kinds)

    def embed(
        self, texts: list[str], kinds: frozenset[str], role: InputType
    ) -> list[TextEmbedding]:
        """Embed texts as vectors of these kinds, or of all kinds; dense ones have unit length."""
        body: dict[str, Any] = {"sentences": texts, "normalize_dense": True, "model": self._model}
        if kinds:
            body |= {f"return_{kind}": kind in kinds for kind in KINDS}
        if self._input_types:
            body["input_type"] = role
        embeddings, _ = read_safetensors(self._service.work(EMBED, body, SAFETENSORS).content)
        return embeddings

    def rerank(self, query: str, passages: list[str]) -> list[float]:
        """Return a score for each passage."""
        body = {"query": query, "passages": passages, "model": self._reranker}
        results = self._service.work(RERANK, body).json()["results"]
        return [result["score"] for result in sorted(results, key=lambda result: result["index"])]

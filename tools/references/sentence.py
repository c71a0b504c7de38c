"""sentence-transformers, the reference of dense encoders, SPLADE, ColBERT and cross-encoders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from sentence_transformers.sentence_transformer.modules import Normalize

from smart_embedder.models.files.config import NO_OVERRIDES, POOLINGS, SentenceOverrides
from smart_embedder.requests import NO_OPTIONS, EmbeddingOptions
from smart_embedder.results import SparseVector, TextEmbedding

PACKAGE = "sentence-transformers"
_NO_LIMIT = 2**31


class Dense:
    """Vectors of `SentenceTransformer`; `overrides` replace values of its configuration."""

    package = PACKAGE

    def __init__(
        self,
        folder: Path,
        max_length: int,
        overrides: SentenceOverrides = NO_OVERRIDES,
    ) -> None:
        self._model = model = _load(SentenceTransformer, folder, max_length)
        if overrides.pooling is not None:
            names = {pooling: name for name, pooling in POOLINGS.items()}
            model[1].pooling_mode = names[overrides.pooling]
        if overrides.normalize is not None:
            if isinstance(model[-1], Normalize):
                del model[-1]
            if overrides.normalize:
                model.append(Normalize())
        model.prompts |= overrides.prompts

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """Embed texts as `EmbeddingReference.embed`."""
        vectors = _choose_encode(self._model, options)(texts, show_progress_bar=False)
        return [TextEmbedding(dense=vector) for vector in np.asarray(vectors, np.float32)]


class Sparse:
    """Vectors of `SparseEncoder`."""

    package = PACKAGE

    def __init__(self, folder: Path, max_length: int) -> None:
        self._model = _load(SparseEncoder, folder, max_length)

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """Embed texts as `EmbeddingReference.embed`."""
        encode = _choose_encode(self._model, options)
        rows = encode(texts, show_progress_bar=False, convert_to_tensor=False, save_to_cpu=True)
        found = [row.coalesce() for row in rows]
        vectors = (SparseVector(row.indices()[0].numpy(), row.values().numpy()) for row in found)
        return [TextEmbedding(sparse=vector) for vector in vectors]


class MultiVector:
    """Vectors of `MultiVectorEncoder`; a text without a type is a document.

    The checkpoint has its own, lower limits of length, another one for queries.
    """

    package = PACKAGE

    def __init__(self, folder: Path) -> None:
        self._model = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True).float()

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """Embed texts as `EmbeddingReference.embed`, with the model's markers for any prompt."""
        model = self._model
        encode = model.encode_query if options.input_type == "query" else model.encode_document
        vectors = encode(texts, convert_to_numpy=True, show_progress_bar=False)
        return [TextEmbedding(colbert=rows) for rows in vectors]


class Reranker:
    """Scores of `CrossEncoder`, with one label, or of the label `kind`."""

    package = PACKAGE

    def __init__(self, folder: Path, max_length: int, kind: str | None = None) -> None:
        self._model = _load(CrossEncoder, folder, max_length)
        self._kind = kind

    def scores(self, query: str, passages: list[str]) -> list[float]:
        """Return the logit, or with several labels the log odds of the one that ranks."""
        logits: torch.Tensor = self._model.predict(
            [(query, passage) for passage in passages],
            activation_fn=torch.nn.Identity(),
            convert_to_tensor=True,
            show_progress_bar=False,
        ).cpu()
        if logits.dim() == 1:
            return logits.tolist()
        ranking = list(self._model.config.id2label.values()).index(self._kind)
        probabilities = logits.double().softmax(dim=1)[:, ranking]
        return torch.logit(probabilities).tolist()


def _load(model_class: Callable[..., Any], folder: Path, max_length: int) -> Any:
    """Load a model in float32, with the service's limit of length."""
    model = model_class(str(folder), device="cpu", local_files_only=True).float()
    model.max_seq_length = min(max_length, model.max_seq_length or _NO_LIMIT)
    return model


def _choose_encode(model: Any, options: EmbeddingOptions) -> Callable[..., Any]:
    """Return the model's method for the input type, or one with the prompt of `options`."""
    if options.prompt is not None:
        return lambda texts, **kwargs: model.encode(texts, prompt=options.prompt, **kwargs)
    by_type = {"query": model.encode_query, "document": model.encode_document, None: model.encode}
    return by_type[options.input_type]  # type: ignore[no-any-return]

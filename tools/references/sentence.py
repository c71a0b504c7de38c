"""sentence-transformers: any dense encoder, SPLADE, ColBERT and cross-encoders."""

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
from smart_embedder.models.rerankers.cross_encoder import find_ranking_label
from smart_embedder.requests import NO_OPTIONS, EmbeddingOptions
from smart_embedder.results import SparseVector, TextEmbedding

PACKAGE = "sentence-transformers"
_NO_LIMIT = 2**31


class Dense:
    """`SentenceTransformer`; `overrides` take the place of what its configuration says."""

    package = PACKAGE

    def __init__(
        self,
        folder: Path,
        max_length: int,
        device: str,
        overrides: SentenceOverrides = NO_OVERRIDES,
    ) -> None:
        self._model = model = _loaded(SentenceTransformer, folder, max_length, device)
        if overrides.pooling is not None:
            names = {ours: theirs for theirs, ours in POOLINGS.items()}
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
        """As `EmbeddingReference.embed`."""
        vectors = _encoder(self._model, options)(texts, show_progress_bar=False)
        return [TextEmbedding(dense=vector) for vector in np.asarray(vectors, np.float32)]


class Sparse:
    """`SparseEncoder`."""

    package = PACKAGE

    def __init__(self, folder: Path, max_length: int, device: str) -> None:
        self._model = _loaded(SparseEncoder, folder, max_length, device)

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """As `EmbeddingReference.embed`."""
        encode = _encoder(self._model, options)
        rows = encode(texts, show_progress_bar=False, convert_to_tensor=False, save_to_cpu=True)
        found = [row.coalesce() for row in rows]
        vectors = (SparseVector(row.indices()[0].numpy(), row.values().numpy()) for row in found)
        return [TextEmbedding(sparse=vector) for vector in vectors]


class MultiVector:
    """`MultiVectorEncoder`, which reads texts of no type as documents."""

    package = PACKAGE

    def __init__(self, folder: Path, max_length: int, device: str) -> None:
        del max_length  # The checkpoint's own limits are lower, and apart for queries.
        self._model = MultiVectorEncoder(str(folder), device=device, local_files_only=True).float()

    def embed(
        self, texts: list[str], options: EmbeddingOptions = NO_OPTIONS
    ) -> list[TextEmbedding]:
        """As `EmbeddingReference.embed`; the markers are the model's, whatever `prompt` is."""
        model = self._model
        encode = model.encode_query if options.input_type == "query" else model.encode_document
        vectors = encode(texts, convert_to_numpy=True, show_progress_bar=False)
        return [TextEmbedding(colbert=each) for each in vectors]


class Reranker:
    """`CrossEncoder`, with one label or several."""

    package = PACKAGE

    def __init__(self, folder: Path, max_length: int, device: str) -> None:
        self._model = _loaded(CrossEncoder, folder, max_length, device)

    def scores(self, query: str, passages: list[str]) -> list[float]:
        """The logit, or of several labels the logarithm of the odds of the one that ranks."""
        logits: torch.Tensor = self._model.predict(
            [(query, passage) for passage in passages],
            activation_fn=torch.nn.Identity(),
            convert_to_tensor=True,
            show_progress_bar=False,
        ).cpu()
        if logits.dim() == 1:
            return logits.tolist()
        ranking = find_ranking_label(tuple(self._model.config.id2label.values()))
        if ranking is None:
            raise ValueError("none of the labels says that a passage answers a query")
        chances = logits.double().softmax(dim=1)[:, ranking]
        return torch.logit(chances).tolist()


def _loaded(kind: Callable[..., Any], folder: Path, max_length: int, device: str) -> Any:
    """In float32, whatever the files are; texts are cut as the service cuts them."""
    model = kind(str(folder), device=device, local_files_only=True).float()
    model.max_seq_length = min(max_length, model.max_seq_length or _NO_LIMIT)
    return model


def _encoder(model: Any, options: EmbeddingOptions) -> Callable[..., Any]:
    """The method that reads texts as `options` say."""
    if options.prompt is not None:
        return lambda texts, **how: model.encode(texts, prompt=options.prompt, **how)
    by_type = {"query": model.encode_query, "document": model.encode_document, None: model.encode}
    return by_type[options.input_type]  # type: ignore[no-any-return]

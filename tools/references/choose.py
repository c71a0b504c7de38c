"""Which reference implementation a model has: decided by its folder, as the service decides.

A package is imported when a model needs it: they take seconds, and one may be missing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from smart_embedder.models.families.registry import is_qwen3
from smart_embedder.models.files.config import (
    has_modules,
    read_config,
    read_modules,
)
from smart_embedder.models.heads.colbert import is_colbert
from smart_embedder.models.heads.m3 import HEADS
from smart_embedder.models.loader import locate_models, overrides_of
from smart_embedder.models.rerankers.cross_encoder import is_classifier
from smart_embedder.pipelines.reranking import fuse, score
from smart_embedder.requests import EmbeddingOptions, FusionWeights
from smart_embedder.settings import LATE_INTERACTION, EngineSettings, ModelEntry
from tools.packages import install_command
from tools.references.reference import EmbeddingReference, ReferenceMissingError, RerankingReference

_FLAG_TYPES = ("xlm-roberta", "roberta")


class References:
    """Those of the models that the settings name; each is loaded when it is first asked for.

    `dtype` is that of a Qwen reranker; all others compute in float32.

    Raises `ReferenceMissingError` where its package is not installed, and `StartupError` for a
    model that is not there.
    """

    def __init__(
        self, settings: EngineSettings, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        self._settings = settings
        self._device = device
        self._dtype = dtype
        self._folders = locate_models(settings)

    @cached_property
    def embedding(self) -> EmbeddingReference:
        """Of the embedding model."""
        return self._embedder(self._folders.embedding, self._settings.default_entries.embedder)

    @cached_property
    def dense(self) -> EmbeddingReference | None:
        """Of the model for dense vectors, where it is one of its own."""
        folder, entry = self._folders.dense, self._settings.default_entries.dense
        return None if folder is None or entry is None else self._embedder(folder, entry)

    @cached_property
    def reranking(self) -> RerankingReference | None:
        """Of the reranker."""
        if self._settings.reranker_model == LATE_INTERACTION:
            made = self.embedding
            return made if isinstance(made, RerankingReference) else LateInteraction(made)
        folder = self._folders.reranker
        return None if folder is None else self._reranker(folder)

    def _embedder(self, folder: Path, entry: ModelEntry) -> EmbeddingReference:
        settings, device = self._settings, self._device
        if is_qwen3(folder) and not has_modules(folder):
            from tools.references.qwen import QwenEmbedding  # noqa: PLC0415 - see above

            return QwenEmbedding(folder, settings.qwen_embed_max_length, device)
        limit = settings.qwen_embed_max_length if is_qwen3(folder) else settings.embed_max_length
        if any((folder / head).is_file() for head in HEADS):
            with _installed("FlagEmbedding"):
                from tools.references.flag_embedding import M3  # noqa: PLC0415
            return M3(folder, _m3_limit(limit, folder), device)
        with _installed("sentence-transformers"):
            from tools.references import sentence  # noqa: PLC0415
        if any(module.kind == "SpladePooling" for module in read_modules(folder)):
            return sentence.Sparse(folder, limit, device)
        if is_colbert(folder):
            return sentence.MultiVector(folder, limit, device)
        overrides = overrides_of(entry)
        if is_qwen3(folder) and overrides.normalize is None:  # The service's vectors are raw.
            overrides = replace(overrides, normalize=False)
        return sentence.Dense(folder, limit, device, overrides)

    def _reranker(self, folder: Path) -> RerankingReference:
        settings, device = self._settings, self._device
        if is_qwen3(folder) and not is_classifier(folder):
            from tools.references.qwen import QwenReranker  # noqa: PLC0415

            return QwenReranker(folder, settings.qwen_rerank_max_length, device, self._dtype)
        limit = settings.bge_rerank_max_length
        if is_qwen3(folder):
            limit = settings.qwen_rerank_max_length
        config = read_config(folder)
        # Of bge-reranker's shape.
        has_one_label = len(config.get("id2label") or "ab") == 1
        if config.get("model_type") in _FLAG_TYPES and has_one_label:
            with _installed("FlagEmbedding"):
                from tools.references.flag_embedding import Reranker  # noqa: PLC0415
            return Reranker(folder, _m3_limit(limit, folder), device)
        with _installed("sentence-transformers"):
            from tools.references import sentence  # noqa: PLC0415
        return sentence.Reranker(folder, limit, device)


class LateInteraction:
    """The score of the vectors that a reference makes, for a model of one kind."""

    def __init__(self, embedder: EmbeddingReference) -> None:
        self.package = embedder.package
        self._embedder = embedder

    def scores(self, query: str, passages: list[str]) -> list[float]:
        """As `RerankingReference.scores`; no prompt is read."""
        (asked,) = self._embedder.embed([query], EmbeddingOptions(prompt="", input_type="query"))
        found = self._embedder.embed(passages, EmbeddingOptions(prompt="", input_type="document"))
        weights = FusionWeights()
        return [fuse(weights, score(asked, passage)) for passage in found]


def _m3_limit(limit: int, folder: Path) -> int:
    """The limit in force, which a model with fewer positions lowers."""
    config = read_config(folder)
    reserved = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    return min(limit, int(config["max_position_embeddings"]) - reserved)


@contextmanager
def _installed(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ReferenceMissingError(
            f"the reference needs {package}, which '{install_command()}' installs ({error})"
        ) from error

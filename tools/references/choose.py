"""Choose the reference implementation of a model by its folder, as the service chooses its own.

A package is imported only if a model needs it: imports take seconds, and a package may be missing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from smart_embedder.models.families.registry import is_qwen3
from smart_embedder.models.files.config import (
    has_modules,
    is_classifier,
    read_config,
    read_modules,
    transformer_folder,
)
from smart_embedder.models.heads.colbert import is_colbert
from smart_embedder.models.heads.dense import is_qwen3_embedding
from smart_embedder.models.heads.m3 import HEADS
from smart_embedder.models.heads.pooling import SentenceConfig
from smart_embedder.models.loader import locate_models, read_overrides
from smart_embedder.pipelines.reranking import fuse, score
from smart_embedder.requests import EmbeddingOptions, FusionWeights
from smart_embedder.settings import LATE_INTERACTION, EngineSettings, ModelEntry
from tools.packages import install_command
from tools.references.reference import EmbeddingReference, ReferenceMissingError, RerankingReference

_FLAG_TYPES = ("xlm-roberta", "roberta")


class References:
    """The references of the models in the settings, in float32; each is loaded at its first use.

    Raises `ReferenceMissingError` if a package is not installed, and `StartupError` if a model is
    missing.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._folders = locate_models(settings)

    @cached_property
    def embedding(self) -> EmbeddingReference:
        """The reference of the embedding model."""
        return self._load_embedder(self._folders.embedding, self._settings.default_entries.embedder)

    @cached_property
    def dense(self) -> EmbeddingReference | None:
        """The reference of the model for dense vectors, if that is a separate model."""
        folder, entry = self._folders.dense, self._settings.default_entries.dense
        return None if folder is None or entry is None else self._load_embedder(folder, entry)

    @cached_property
    def reranking(self) -> RerankingReference | None:
        """The reference of the reranker."""
        if self._settings.reranker_model == LATE_INTERACTION:
            embedder = self.embedding
            if isinstance(embedder, RerankingReference):
                return embedder
            return LateInteraction(embedder)
        folder = self._folders.reranker
        return None if folder is None else self._load_reranker(folder)

    def _load_embedder(self, folder: Path, entry: ModelEntry) -> EmbeddingReference:
        settings = self._settings
        if is_qwen3(folder) and not has_modules(folder):
            from tools.references.qwen import QwenEmbedding  # noqa: PLC0415 - see above

            return QwenEmbedding(folder, settings.qwen_embed_max_length)
        limit = settings.qwen_embed_max_length if is_qwen3(folder) else settings.embed_max_length
        if any((folder / head).is_file() for head in HEADS):
            with _require("FlagEmbedding"):
                from tools.references.flag_embedding import M3  # noqa: PLC0415
            return M3(folder, _lower_limit(limit, folder))
        with _require("sentence-transformers"):
            from tools.references import sentence  # noqa: PLC0415
        if any(module.kind == "SpladePooling" for module in read_modules(folder)):
            return sentence.Sparse(folder, limit)
        if is_colbert(folder):
            return sentence.MultiVector(folder)
        overrides = read_overrides(entry)
        config = SentenceConfig.read(folder)
        is_raw = is_qwen3(folder) and is_qwen3_embedding(transformer_folder(folder), config)
        if is_raw and overrides.normalize is None:
            overrides = replace(overrides, normalize=False)
        return sentence.Dense(folder, limit, overrides)

    def _load_reranker(self, folder: Path) -> RerankingReference:
        settings = self._settings
        if is_qwen3(folder) and not is_classifier(folder):
            from tools.references.qwen import QwenReranker  # noqa: PLC0415

            return QwenReranker(folder, settings.qwen_rerank_max_length)
        limit = settings.bge_rerank_max_length
        if is_qwen3(folder):
            limit = settings.qwen_rerank_max_length
        config = read_config(folder)
        has_one_label = len(config.get("id2label") or "ab") == 1
        if config.get("model_type") in _FLAG_TYPES and has_one_label:
            with _require("FlagEmbedding"):
                from tools.references.flag_embedding import Reranker  # noqa: PLC0415
            return Reranker(folder, _lower_limit(limit, folder))
        with _require("sentence-transformers"):
            from tools.references import sentence  # noqa: PLC0415
        return sentence.Reranker(folder, limit, settings.reranker_kind)


class LateInteraction:
    """Scores passages by the vectors of a reference."""

    def __init__(self, embedder: EmbeddingReference) -> None:
        self.package = embedder.package
        self._embedder = embedder

    def scores(self, query: str, passages: list[str]) -> list[float]:
        """Score passages as `RerankingReference.scores`, without prompts."""
        (query_vectors,) = self._embedder.embed(
            [query], EmbeddingOptions(prompt="", input_type="query")
        )
        found = self._embedder.embed(passages, EmbeddingOptions(prompt="", input_type="document"))
        weights = FusionWeights()
        return [fuse(weights, score(query_vectors, passage)) for passage in found]


def _lower_limit(limit: int, folder: Path) -> int:
    """Lower the limit to the number of the model's positions."""
    config = read_config(folder)
    reserved = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    return min(limit, int(config["max_position_embeddings"]) - reserved)


@contextmanager
def _require(package: str) -> Iterator[None]:
    """Turn an `ImportError` in the block into a `ReferenceMissingError`."""
    try:
        yield
    except ImportError as error:
        raise ReferenceMissingError(
            f"the reference needs {package}: run '{install_command()}' ({error})"
        ) from error

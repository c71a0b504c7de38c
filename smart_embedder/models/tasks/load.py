"""Which task a model is for, and how it is loaded: decided by the files of its folder."""

from pathlib import Path

import structlog

from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint.config import (
    NO_OVERRIDES,
    SentenceOverrides,
    read_modules,
    read_optional,
)
from smart_embedder.models.families.load import is_qwen3
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.base import EmbeddingModel
from smart_embedder.models.tasks.colbert import is_colbert, load_colbert_embedder
from smart_embedder.models.tasks.cross_encoder import (
    CrossEncoder,
    is_classifier,
    load_cross_encoder,
)
from smart_embedder.models.tasks.dense import HEADS, load_dense_embedder, load_m3_embedder
from smart_embedder.models.tasks.qwen3 import QwenReranker, load_qwen_reranker
from smart_embedder.models.tasks.splade import load_splade_embedder

log = structlog.get_logger(__name__)

_SPARSE_ALONE = {"Router", "Asym", "SparseAutoEncoder", "SparseStaticEmbedding"}


def load_embedder(
    name: str,
    folder: Path,
    max_length: int,
    target: Target,
    overrides: SentenceOverrides = NO_OVERRIDES,
) -> EmbeddingModel:
    """Load the embedding model in `folder`; texts are cut to `max_length` tokens or to fewer.

    Raises `StartupError` for whatever is wrong with the folder, and for `overrides` that have no
    effect on such a model.
    """
    _warn_of_code(name, folder)
    pooling = None
    for module in read_modules(folder):
        if module.kind in _SPARSE_ALONE:
            raise StartupError(
                f"{folder} makes sparse vectors by {module.kind}, which is not computed here; "
                "SpladePooling is"
            )
        if module.kind == "SpladePooling":
            pooling = module.folder
            break
    model: EmbeddingModel
    if pooling is not None:
        overrides.refuse("pooling", "normalize", for_model=f"{name}, a SPLADE model")
        model = load_splade_embedder(name, folder, max_length, target, pooling=pooling)
    elif is_colbert(folder):
        every = ("pooling", "normalize", "query_prompt", "document_prompt")
        overrides.refuse(*every, for_model=f"{name}, a ColBERT model")
        model = load_colbert_embedder(name, folder, max_length, target)
    elif any((folder / head).is_file() for head in HEADS):
        kind = f"{name}, which is of bge-m3's kind"
        overrides.refuse("pooling", "normalize", for_model=kind)
        model = load_m3_embedder(name, folder, max_length, target)
    else:
        model = load_dense_embedder(name, folder, max_length, target, overrides)
    model.prompts = {**model.prompts, **overrides.prompts}
    return model


def load_reranker(
    name: str, folder: Path, max_length: int, target: Target, *, max_qwen_pairs: int
) -> CrossEncoder | QwenReranker:
    """Load the reranker in `folder`; a pair is cut to `max_length` tokens or to fewer.

    `max_qwen_pairs` is the most pairs in one forward of a Qwen3 model. Raises `StartupError` for
    whatever is wrong with the folder.
    """
    _warn_of_code(name, folder)
    if is_qwen3(folder) and not is_classifier(folder):
        return load_qwen_reranker(name, folder, max_length, max_qwen_pairs, target)
    return load_cross_encoder(name, folder, max_length, target)


def _warn_of_code(name: str, folder: Path) -> None:
    """Log that a model names code of its own, where a class of transformers takes its place."""
    for file in ("config.json", "tokenizer_config.json"):
        if "auto_map" in read_optional(folder / file):
            log.warning(
                "checkpoint_code_ignored",
                model=name,
                detail=f"{file} names code of its own (auto_map), which is never run: the class of "
                "transformers is computed, which may differ",
            )

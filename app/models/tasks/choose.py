"""Which task a model is for, and how it is loaded: decided by the files of its folder."""

from pathlib import Path

from app.errors import StartupError
from app.models.backbone import Target
from app.models.checkpoint.config import read_config
from app.models.checkpoint.modules import read_modules
from app.models.tasks.colbert import load_colbert_embedder
from app.models.tasks.colbert_config import is_colbert
from app.models.tasks.cross_encoder import CrossEncoder, load_cross_encoder
from app.models.tasks.device_model import EmbeddingModel
from app.models.tasks.m3 import load_m3_embedder
from app.models.tasks.qwen3 import QwenReranker, load_qwen_embedder, load_qwen_reranker
from app.models.tasks.splade import load_splade_embedder

_SPARSE_ALONE = {"Router", "Asym", "SparseAutoEncoder", "SparseStaticEmbedding"}


def is_qwen(folder: Path) -> bool:
    """Whether the folder holds a model of Qwen3's kind, which has settings of its own."""
    return bool(read_config(folder).get("model_type") == "qwen3")


def load_embedder(name: str, folder: Path, max_length: int, target: Target) -> EmbeddingModel:
    """Load the embedding model in `folder`; texts are cut to `max_length` tokens or to fewer.

    Raises `StartupError` for whatever is wrong with the folder.
    """
    for module in read_modules(folder):
        if module.kind in _SPARSE_ALONE:
            raise StartupError(
                f"{folder} makes sparse vectors by {module.kind}, which is not computed here; "
                "SpladePooling is"
            )
        if module.kind == "SpladePooling":
            return load_splade_embedder(name, folder, max_length, target, pooling=module.folder)
    if is_colbert(folder):
        return load_colbert_embedder(name, folder, max_length, target)
    load = load_qwen_embedder if is_qwen(folder) else load_m3_embedder
    return load(name, folder, max_length, target)


def load_reranker(
    name: str, folder: Path, max_length: int, target: Target, *, max_qwen_pairs: int
) -> CrossEncoder | QwenReranker:
    """Load the reranker in `folder`; a pair is cut to `max_length` tokens or to fewer.

    `max_qwen_pairs` is the most pairs in one forward of a Qwen3 model. Raises `StartupError` for
    whatever is wrong with the folder.
    """
    if is_qwen(folder):
        return load_qwen_reranker(name, folder, max_length, max_qwen_pairs, target)
    return load_cross_encoder(name, folder, max_length, target)

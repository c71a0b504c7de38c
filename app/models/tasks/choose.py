"""Which task a model is for, and how it is loaded: decided by the files of its folder."""

from pathlib import Path

from app.errors import StartupError
from app.models.checkpoint.modules import read_modules
from app.models.families import is_qwen3
from app.models.target import Target
from app.models.tasks.colbert import load_colbert_embedder
from app.models.tasks.colbert_config import is_colbert
from app.models.tasks.cross_encoder import CrossEncoder, load_cross_encoder
from app.models.tasks.dense import load_dense_embedder
from app.models.tasks.device_model import EmbeddingModel
from app.models.tasks.m3 import HEADS, load_m3_embedder
from app.models.tasks.qwen3 import QwenReranker, load_qwen_reranker
from app.models.tasks.splade import load_splade_embedder

_SPARSE_ALONE = {"Router", "Asym", "SparseAutoEncoder", "SparseStaticEmbedding"}


def load_embedder(
    name: str, folder: Path, max_length: int, target: Target, *, pooling: str | None = None
) -> EmbeddingModel:
    """Load the embedding model in `folder`; texts are cut to `max_length` tokens or to fewer.

    `pooling` takes the place of what a configuration says, where the model is not of bge-m3's kind.
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
    if any((folder / head).is_file() for head in HEADS):
        if pooling is not None:
            raise StartupError(
                f"POOLING={pooling} has no effect on {name}, which is of bge-m3's kind"
            )
        return load_m3_embedder(name, folder, max_length, target)
    return load_dense_embedder(name, folder, max_length, target, pooling=pooling)


def load_reranker(
    name: str, folder: Path, max_length: int, target: Target, *, max_qwen_pairs: int
) -> CrossEncoder | QwenReranker:
    """Load the reranker in `folder`; a pair is cut to `max_length` tokens or to fewer.

    `max_qwen_pairs` is the most pairs in one forward of a Qwen3 model. Raises `StartupError` for
    whatever is wrong with the folder.
    """
    if is_qwen3(folder):
        return load_qwen_reranker(name, folder, max_length, max_qwen_pairs, target)
    return load_cross_encoder(name, folder, max_length, target)

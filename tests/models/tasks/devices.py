"""What the simulated devices compute: which models, in what, and of which texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smart_embedder.engine.records import Outputs, TokenIds
from smart_embedder.models.device.choose import choose_dtype
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks.dense import DenseEmbedder
from smart_embedder.models.tasks.embedders import M3Embedder
from smart_embedder.models.tasks.rerankers import CrossEncoder, QwenReranker

CUDA, MPS = torch.device("cuda:0"), torch.device("mps:0")
EVERY = Outputs(dense=True, sparse=True, colbert=True)
TEXTS = ["search", "a hybrid search over vectors and words", "search", "the sea and the mountain"]


def target(device: torch.device, dtype: torch.dtype | None = None, *, qwen: bool = False) -> Target:
    """In the format that is chosen for the model, unless one is named."""
    dtype = dtype or choose_dtype("auto", device, qwen=qwen)
    return Target(device, dtype, choose_backend(device, dtype))


def embedded(model: Any) -> list[TokenIds]:
    return [text.ids for text in model.tokenize(TEXTS)]


def reranked(model: Any) -> list[TokenIds]:
    return [pair.ids for pair in model.tokenize_pairs("search", TEXTS, None)]


# The fixture of a model's folder, how it is made of it, and what it reads.
Kind = tuple[str, Callable[[Path, Target], Any], Callable[[Any], list[TokenIds]]]
MODELS: dict[str, Kind] = {
    "bge-m3": ("tiny_m3", lambda at, how: M3Embedder("m3", at, 8192, how), embedded),
    "bge-reranker": ("tiny_reranker", lambda at, how: CrossEncoder("bge", at, 512, how), reranked),
    "Qwen3-Embedding": ("tiny_qwen", lambda at, how: DenseEmbedder("q", at, 512, how), embedded),
    "Qwen3-Reranker": ("tiny_qwen", lambda at, how: QwenReranker("q", at, 512, 16, how), reranked),
}


def started(
    kind: Kind, request: pytest.FixtureRequest, device: torch.device, how: Target | None = None
) -> tuple[Any, list[TokenIds]]:
    """A model on the device, and the sequences that it is to compute."""
    fixture, make, read = kind
    how = how or target(device, qwen="qwen" in fixture)
    model = make(request.getfixturevalue(fixture), how)
    return model, read(model)

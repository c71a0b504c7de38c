"""Every kind of model on a simulated GPU of Apple's, from its files to its results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertModel

from smart_embedder.engine.records import Outputs
from smart_embedder.models.batch import pack
from smart_embedder.models.device.choose import choose_dtype
from smart_embedder.models.loader import load_embedder
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks import pooling
from smart_embedder.models.tasks.rerankers import CrossEncoder, QwenReranker
from tests.support.simulated_mps import simulated_mps
from tests.support.wordpiece import save_colbert

DEVICE = torch.device("mps:0")
TEXTS = ["search", "a hybrid search over vectors and words", "search", "the sea and the mountain"]


def target(*, qwen: bool = False) -> Target:
    dtype = choose_dtype("auto", DEVICE, qwen=qwen)
    return Target(DEVICE, dtype, choose_backend(DEVICE, dtype))


def embedded(model: Any) -> Any:
    return model, [text.ids for text in model.tokenize(TEXTS)]


def reranked(model: Any) -> Any:
    return model, [pair.ids for pair in model.tokenize_pairs("search", TEXTS, None)]


def embedder(folder: Path) -> Any:
    return embedded(load_embedder("m", folder, 512, target()))


MODELS: dict[str, Callable[[Path], Any]] = {
    "tiny_m3": embedder,
    "demo_checkpoint": embedder,
    "tiny_reranker": lambda folder: reranked(CrossEncoder("bge", folder, 512, target())),
    "tiny_qwen": lambda folder: reranked(QwenReranker("qwen", folder, 512, 16, target(qwen=True))),
    "colbert": embedder,
}


@pytest.fixture
def colbert(tmp_path: Path) -> Path:
    return save_colbert(tmp_path / "colbert", BertModel)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_starts_and_answers_by_operators_that_apples_gpus_have(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name)
    with simulated_mps() as device:
        model, sequences = MODELS[name](folder)
        every = Outputs(dense=True, sparse=True, colbert=True)
        results = model.launch(sequences, [every] * len(sequences))()
    assert not model.info.refused
    assert len(results) == len(sequences)
    assert not any(isinstance(each, Exception) for each in results)
    assert device.called


@pytest.mark.parametrize("name", pooling._POOLINGS)
def test_every_pooling_runs_there_by_operators_that_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    texts, hidden = (
        [np.full(length, 5, np.int64) for length in (3, 1, 7)],
        torch.randn(11, 8).half(),
    )
    with simulated_mps() as device:
        packed = pack(texts, device=DEVICE)
        pooled = pooling.pool(hidden.to(DEVICE), packed, [name], np.arange(3))
    assert pooled.shape == (3, 8)
    assert device.called
    packed = pack(texts, device=torch.device("cpu"))
    for how in ("mean", "max", "sum"):
        expected = pooling._reduced(hidden, packed, how)
        torch.testing.assert_close(pooling.one_by_one(hidden, packed, how), expected)

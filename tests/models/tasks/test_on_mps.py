"""Every kind of model on a simulated GPU of Apple's, from its files to its results."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel

from smart_embedder.models.batch import pack
from smart_embedder.models.loader import load_embedder
from smart_embedder.models.tasks import pooling
from tests.models.tasks.devices import EVERY, MODELS, MPS, Kind, embedded, started
from tests.support.simulated_mps import simulated_mps
from tests.support.wordpiece import save_colbert

MORE: dict[str, Kind] = {
    name: (name, lambda folder, how: load_embedder("m", folder, 512, how), embedded)
    for name in ("demo_checkpoint", "colbert")
}


@pytest.fixture
def colbert(tmp_path: Path) -> Path:
    return save_colbert(tmp_path / "colbert", BertModel)


@pytest.mark.parametrize("kind", [*MODELS.values(), *MORE.values()], ids=[*MODELS, *MORE])
def test_a_model_starts_and_answers_by_operators_that_apples_gpus_have(
    kind: Kind, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(kind[0])  # On this machine.
    with simulated_mps() as device:
        model, sequences = started(kind, request, MPS)
        results = model.launch(sequences, [EVERY] * len(sequences))()
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
        packed = pack(texts, device=MPS)
        pooled = pooling.pool(hidden.to(MPS), packed, [name], np.arange(3))
    assert pooled.shape == (3, 8)
    assert device.called
    packed = pack(texts, device=torch.device("cpu"))
    for how in ("mean", "max", "sum"):
        expected = pooling._reduced(hidden, packed, how)
        torch.testing.assert_close(pooling.one_by_one(hidden, packed, how), expected)

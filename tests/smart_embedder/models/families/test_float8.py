"""Products in float8 by PyTorch's operator, which computes the same on a CPU as on a GPU."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.nn import functional
from transformers import ModernBertModel

from smart_embedder.errors import StartupError
from smart_embedder.kernels.backend import Backend, float8_product, torch_backend
from smart_embedder.kernels.cuda import CUDA, cuda_backend
from smart_embedder.kernels.target import Target
from smart_embedder.models.families import registry as load
from smart_embedder.models.heads.m3 import M3Embedder
from smart_embedder.models.loader import load_embedder
from smart_embedder.requests import Outputs
from tests.support.texts import varied_texts
from tests.support.wordpiece import MODERNBERT, save_colbert

CPU = torch.device("cpu")
DENSE = Outputs(dense=True)


@pytest.fixture
def backend() -> Backend:
    """A GPU's backend, except its attention."""
    product = cuda_backend(torch.device("cuda"), torch.float32).float8_product
    return torch_backend().prefer(CUDA, float8_product=product)


def target(backend: Backend, dtype: torch.dtype = torch.bfloat16) -> Target:
    return Target(CPU, dtype, backend, float8=True)


@pytest.mark.parametrize("name", ["tiny_m3", "tiny_qwen"])
def test_float8_vectors_are_near_bfloat16_alone_and_in_a_batch(
    name: str, backend: Backend, request: pytest.FixtureRequest
) -> None:
    folder, vectors = request.getfixturevalue(name), []
    for float8 in (True, False):
        changed = replace(target(backend), float8=float8)
        model = load_embedder(name, folder, 512, changed)
        sequences = [text.ids for text in model.tokenize(varied_texts(6))]
        together = np.stack([embedding.dense for embedding in model.forward(sequences, DENSE)])
        assert model.info.dtype == ("float8" if float8 else "bfloat16")
        assert (model.info.paths.get("float8_product") == CUDA) == float8
        alone = np.stack([model.forward([ids], DENSE)[0].dense for ids in sequences])
        np.testing.assert_allclose(alone, together, rtol=0, atol=4e-3)
        vectors.append(torch.from_numpy(together))
    assert 0.98 < functional.cosine_similarity(*vectors).min() < 1 - 1e-5


def test_float8_is_refused_on_a_device_that_multiplies_wrongly(tiny_m3: Path) -> None:
    def twice(*given: object) -> torch.Tensor:
        return 2 * float8_product(*given)  # type: ignore[arg-type]

    wrong = torch_backend().prefer(CUDA, float8_product=twice)
    with (
        capture_logs() as logs,
        pytest.raises(StartupError, match="does not multiply in float8 correctly"),
    ):
        M3Embedder("m3", tiny_m3, 512, target(wrong))
    assert [(line["operation"], line["path"]) for line in logs] == [("float8_product", CUDA)]


def test_float8_is_refused_for_a_model_with_a_low_cosine(
    backend: Backend, tiny_m3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_MIN_COSINE", 0.99999)
    expected = r"in float8 a vector of tiny-m3 has a cosine of 0\.9\d+ with the one in bfloat16, "
    with pytest.raises(StartupError, match=expected):
        M3Embedder("m3", tiny_m3, 512, target(backend))


def test_float8_is_refused_for_other_families(backend: Backend, tmp_path: Path) -> None:
    folder = save_colbert(tmp_path / "model", ModernBertModel, **MODERNBERT)
    with pytest.raises(StartupError, match="DTYPE=float8 is for models of BERT's kind and Qwen3"):
        load_embedder("colbert", folder, 512, target(backend))

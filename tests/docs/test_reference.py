"""docs/ lists every error, every field of a request, every metric, and the launcher's limits."""

import re

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model, XLMRobertaConfig, XLMRobertaModel

from app.error_responses import status_of
from app.errors import ClientGoneError
from app.schemas import EmbeddingRequest, RerankBody
from launcher.gpu import (
    CPU_LIMITS,
    CUDA_VERSION,
    OLDEST_DRIVER,
    gpu_limits,
)
from scripts.metrics_docs import PAGE as METRICS
from scripts.metrics_docs import with_table
from smart_embedder.errors import SmartEmbedderError, StartupError, UnavailableError
from tests.support.server import REPOSITORY

CONFIGURATION = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
DOCKER = (REPOSITORY / "docs" / "docker.md").read_text(encoding="utf-8")
API = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
# No client receives these: one has no reader, one ends the start, one is a base class.
NEVER_ANSWERED = {ClientGoneError, StartupError, UnavailableError}


def subclasses(kind: type[SmartEmbedderError]):
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


KINDS = sorted(
    {SmartEmbedderError, *subclasses(SmartEmbedderError)} - NEVER_ANSWERED, key=lambda x: x.code
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_every_error_is_listed_with_its_status(kind: type[SmartEmbedderError]) -> None:
    assert f"| {status_of(kind(''))} | `{kind.code}` |" in API


@pytest.mark.parametrize("field", [*EmbeddingRequest.model_fields, *RerankBody.model_fields])
def test_every_field_of_a_request_is_listed(field: str) -> None:
    assert f"| `{field}` |" in API


def test_the_table_of_metrics_is_what_the_registry_says() -> None:
    page = METRICS.read_text(encoding="utf-8")
    assert with_table(page) == page, "run python -m scripts.metrics_docs"


@pytest.mark.parametrize("limits", [*map(gpu_limits, (6 << 10, 8 << 10, 24 << 10)), CPU_LIMITS])
def test_the_limits_of_the_launcher_are_listed(limits: tuple[int, int]) -> None:
    batch, length = limits
    assert f"| {batch} | {length} |" in CONFIGURATION


def test_the_weights_on_a_gpu_are_computed_from_the_models_parameters() -> None:
    base = {"hidden_size": 1024, "num_attention_heads": 16}
    xlm_roberta = {"vocab_size": 250_002, "num_hidden_layers": 24, "intermediate_size": 4096}
    qwen3 = {"vocab_size": 151_669, "num_hidden_layers": 28, "intermediate_size": 3072}
    qwen3 |= {"num_key_value_heads": 8, "head_dim": 128}
    with torch.device("meta"):
        bge = XLMRobertaModel(
            XLMRobertaConfig(**base, **xlm_roberta, max_position_embeddings=8194, type_vocab_size=1)
        )
        qwen = Qwen3Model(Qwen3Config(**base, **qwen3))
    sizes = {"bge-": 2e-9 * bge.num_parameters(), "Qwen3-": 2e-9 * qwen.num_parameters()}
    table = DOCKER.partition("### Memory of an NVIDIA GPU")[2].partition("CUDA's context")[0]
    rows = re.findall(r"(?m)^\| (bge-m3.*) \| ([\d.]+) GB \|$", table)
    assert len(rows) == 6
    for models, size in rows:
        computed = sum(models.count(name) * sizes[name] for name in sizes)
        assert size == f"{computed:.1f}", models


def test_the_page_names_the_cuda_and_the_driver_that_pytorchs_build_needs() -> None:
    lock = (REPOSITORY / "requirements/torch-gpu.lock").read_text()
    (cuda,) = re.findall(r"(?m)^cuda-toolkit==(\d+\.\d+)", lock)
    assert f"PyTorch's build for CUDA {cuda} " in DOCKER
    assert f"cuda-compat-{cuda.replace('.', '-')}" in DOCKER
    assert f"{CUDA_VERSION // 1000}.{CUDA_VERSION % 1000 // 10}" == cuda
    assert f"driver {OLDEST_DRIVER} or newer" in DOCKER

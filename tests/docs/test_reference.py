"""docs/ lists every error, every field of a request, every metric, and what the launcher sets."""

import pytest

from launcher.gpu import CPU_LIMITS, RerankLimits, gpu_limits
from scripts.metrics_docs import PAGE as METRICS
from scripts.metrics_docs import with_table
from smart_embedder import errors
from smart_embedder.api.errors import status_of
from smart_embedder.api.schemas import EmbeddingRequest, RerankBody
from smart_embedder.errors import SmartEmbedderError, StartupError, UnavailableError
from tests.support.server import REPOSITORY

CONFIGURATION = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
API = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
# No client receives these: one has no reader, one ends the start, one is a base class.
NEVER_ANSWERED = {errors.ClientGoneError, StartupError, UnavailableError}


def subclasses(kind: type[SmartEmbedderError]):
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


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
def test_what_the_launcher_sets_by_the_memory_is_listed(limits: RerankLimits) -> None:
    assert f"| {limits.batch_size} | {limits.max_length} |" in CONFIGURATION

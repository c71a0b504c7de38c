"""Which dialect and endpoint a path belongs to, before a body is read."""

import pytest

from smart_embedder.api.context import NATIVE
from smart_embedder.api.dialects.cohere import COHERE
from smart_embedder.api.dialects.openai import OPENAI
from smart_embedder.api.dialects.tei import TEI
from smart_embedder.api.dialects.vllm import VLLM
from tests.support.paths import PATHS


@pytest.mark.parametrize(
    ("path", "endpoint", "dialects"),
    [
        ("/embeddings/", "/embeddings/", (NATIVE, OPENAI)),
        ("/embeddings/stream", "/embeddings/stream", (NATIVE,)),
        ("/v1/embeddings", "/v1/embeddings", (OPENAI,)),
        ("/v2/rerank", "/rerank", (NATIVE, COHERE, TEI)),
        ("/v1/score", "/score", (VLLM,)),
        ("/v1/embed", "/v2/embed", (COHERE,)),
        ("/api/v1/embed", "/api/v1/embed", (TEI,)),
        ("/predict", "/predict", (TEI,)),
        ("/", "/embed", (NATIVE, TEI)),
        ("/models/own/model/embed", "/embed", (TEI,)),
        ("/models/own/rerank", "/rerank", (TEI,)),
        ("/models/own/v1/embeddings", "/v1/embeddings", (OPENAI,)),
        ("/models/own/embeddings", "/v1/embeddings", (OPENAI,)),
        ("/models/own", "/embed", (TEI,)),
        ("/models/own/model", None, (TEI,)),
        ("/models", None, (OPENAI,)),
        ("/v1/models", None, (OPENAI,)),
        ("/v1/nowhere", None, (OPENAI,)),
        ("/openai", None, (OPENAI,)),
        ("/openai/deployments/x/embeddings", None, (OPENAI,)),
        ("/openair", None, (NATIVE,)),
        ("/info", None, (TEI,)),
        ("/health", None, (NATIVE,)),
    ],
)
def test_a_path_has_an_endpoint_and_its_dialects(path, endpoint, dialects) -> None:
    place = PATHS.find(path)
    assert (place.endpoint and place.endpoint.path, place.dialects) == (endpoint, dialects)


def test_every_endpoint_is_that_of_its_own_path() -> None:
    assert all(PATHS.find(each.path).endpoint is each for each in PATHS.endpoints)
    assert [each.path for each in PATHS.endpoints if each.streams] == ["/embeddings/stream"]


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("/ping", True),
        ("/models/own/model/health", True),
        ("/models/own/ping", True),
        ("/models/health", False),
        ("/models/own/healthy", False),
        ("/own/health", False),
        ("/models", False),
    ],
)
def test_health_checks_of_dialects_need_no_token(path, is_one) -> None:
    assert PATHS.find(path).is_health_check is is_one

"""Which dialect and endpoint a path belongs to, before a body is read."""

import pytest

from app.api.context import ENDPOINTS, Dialect, dialects_of, endpoint_of, is_health_check

NATIVE, OPENAI, TEI, COHERE = Dialect.NATIVE, Dialect.OPENAI, Dialect.TEI, Dialect.COHERE


@pytest.mark.parametrize(
    ("path", "endpoint", "dialects"),
    [
        ("/embeddings/", "/embeddings/", (NATIVE, OPENAI)),
        ("/embeddings/stream", "/embeddings/stream", (NATIVE,)),
        ("/v1/embeddings", "/v1/embeddings", (OPENAI,)),
        ("/v2/rerank", "/rerank", (NATIVE, TEI, COHERE)),
        ("/v1/score", "/score", (Dialect.VLLM,)),
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
    found = endpoint_of(path)
    assert (found and found.path, dialects_of(path)) == (endpoint, dialects)


def test_every_endpoint_is_that_of_its_own_path() -> None:
    assert all(endpoint_of(each.path) is each for each in ENDPOINTS)
    assert [each.path for each in ENDPOINTS if each.streams] == ["/embeddings/stream"]


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("/ping", True),
        ("/models/own/model/health", True),
        ("/models/own/ping", True),
        ("/models/health", True),
        ("/models/own/healthy", False),
        ("/own/health", False),
        ("/models", False),
    ],
)
def test_health_checks_of_dialects_need_no_token(path, is_one) -> None:
    assert is_health_check(path) is is_one

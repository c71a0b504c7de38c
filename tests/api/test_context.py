"""What a path and headers of preferences tell of a request, before a body is read."""

import http_sf
import pytest
from fastapi import Request

from smart_embedder.api.context import NATIVE, preference, preferences
from smart_embedder.api.dialects.cohere import COHERE
from smart_embedder.api.dialects.openai import OPENAI
from smart_embedder.api.dialects.tei import TEI
from smart_embedder.api.dialects.vllm import VLLM
from smart_embedder.api.endpoints.operations import _wants_html
from smart_embedder.api.formats.records import media_type_of
from smart_embedder.api.handler import urgency_of
from smart_embedder.api.rendering import encoding_of
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
    place = PATHS.find(path)[0]
    assert (place.endpoint and place.endpoint.path, place.dialects) == (endpoint, dialects)


def test_every_endpoint_is_that_of_its_own_path() -> None:
    assert all(PATHS.find(each.path)[0].endpoint is each for each in PATHS.endpoints)
    assert [each.path for each in PATHS.endpoints if each.streams] == ["/embeddings/stream"]


HEALTH_CHECKS = ("/ping", "/models/own/model/health", "/models/own/ping")
OTHERS = ("/models/health", "/models/own/healthy", "/own/health", "/models")


@pytest.mark.parametrize("path", [*HEALTH_CHECKS, *OTHERS])
def test_health_checks_of_dialects_need_no_token(path: str) -> None:
    assert PATHS.find(path)[0].is_health_check is (path in HEALTH_CHECKS)


# Without a limit each of these takes its parser 50 to 100 ms.
LONG = {
    "accept": b"text/html, application/msgpack, (" + b"a " * 30_000 + b")",
    "accept-encoding": b"gzip, (" + b"a " * 30_000 + b")",
    "priority": b"u=1, i=(" + b"a " * 30_000 + b")",
}


def request_with(**headers: bytes) -> Request:
    named = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    return Request({"type": "http", "headers": named})


def test_a_header_of_a_usual_length_counts() -> None:
    padding = b"*/*;q=0.1" + b", a/b;q=0.1" * 70
    request = request_with(accept=b"text/html, " + padding, priority=b"u=1")
    assert len(preference(request.headers, "accept")) > 700
    assert _wants_html(request)
    assert urgency_of(request) == 1
    assert encoding_of(request_with(accept_encoding=b"zstd")) == "zstd"


@pytest.mark.parametrize("split", [1, 3])
def test_longer_ones_are_ignored_and_not_parsed(split: int, monkeypatch) -> None:
    """Whether they stand in one line or in several."""
    monkeypatch.setattr(http_sf, "parse", None)
    lines = [
        (name.encode(), value[start : start + len(value) // split + 1])
        for name, value in LONG.items()
        for start in range(0, len(value), len(value) // split + 1)
    ]
    request = Request({"type": "http", "headers": lines})
    assert not _wants_html(request)
    assert media_type_of(request) == "application/json"
    assert encoding_of(request) is None
    assert urgency_of(request) == 3


@pytest.mark.parametrize(
    ("header", "read"),
    [
        ("text/html;q=,", {}),
        ("text/html;q=2, a/b;q=nan, c/d;q=0.1234, ;q=1, ,", {}),
        ("text/html;q=x, A/B", {"a/b": 1.0}),
        ("a/b; v=1 ; Q=0.5,c/d;q=1.000, e/f;q=0", {"a/b": 0.5, "c/d": 1.0, "e/f": 0.0}),
        ("(" + "a " * 400 + ")", {"(" + "a " * 399 + "a )": 1.0}),
    ],
)
def test_a_malformed_item_is_ignored_and_no_parser_of_structured_fields_asked(
    header: str, read: dict[str, float], monkeypatch
) -> None:
    """It would take half a millisecond for 1,000 characters, a request at a time."""
    monkeypatch.setattr(http_sf, "parse", None)
    assert preferences(header) == read


def test_no_more_items_are_read_than_a_real_header_has() -> None:
    header = ",".join(f"a/{i}" for i in range(200))
    assert list(preferences(header)) == [f"a/{i}" for i in range(64)]

"""Facts of a request before its body is read: those of its path, and its preferences."""

import http_sf
import pytest
from fastapi import Request

from app.context import NATIVE
from app.dialects.cohere import COHERE
from app.dialects.ollama import OLLAMA
from app.dialects.openai import OPENAI
from app.dialects.sie_schemas import SIE
from app.dialects.tei_schemas import TEI
from app.formats import media_type_of
from app.headers import is_bulk, parse_preferences, read_preference
from app.routers.pages import _wants_html
from tests.support.formats import JSON, SAFETENSORS
from tests.support.paths import PATHS


@pytest.mark.parametrize(
    ("path", "endpoint", "dialects"),
    [
        ("/embeddings/", "/embeddings/", (NATIVE, OPENAI)),
        ("/v1/embeddings", "/v1/embeddings", (OPENAI,)),
        ("/v2/rerank", "/rerank", (NATIVE, COHERE, TEI)),
        ("/v1/embed", "/v2/embed", (COHERE,)),
        ("/api/v1/embed", "/api/v1/embed", (TEI,)),
        ("/api/embed", "/api/embed", (OLLAMA,)),
        ("/api/show", None, (OLLAMA,)),
        ("/", "/embed", (NATIVE, TEI)),
        ("/models/own/model/embed", "/embed", (TEI,)),
        ("/models/own", "/embed", (TEI, OPENAI)),
        ("/models/own/model", None, (TEI,)),
        ("/models", None, (OPENAI,)),
        ("/openai", None, (OPENAI,)),
        ("/openai/deployments/x/embeddings", "/v1/embeddings", (OPENAI,)),
        ("/openai/deployments/x/chat", None, (OPENAI,)),
        ("/openair", None, (NATIVE,)),
        ("/v1/score/own/model", "/v1/score", (SIE,)),
        # No path of the service has a line feed.
        ("/v1/score/own\nmodel", None, (SIE,)),
    ],
)
def test_a_path_has_an_endpoint_and_its_dialects(path, endpoint, dialects) -> None:
    facts = PATHS.find(path)
    assert (facts.endpoint and facts.endpoint.path, facts.dialects) == (endpoint, dialects)


def test_every_endpoint_has_its_path_and_health_checks_have_none() -> None:
    for endpoint in PATHS.endpoints:
        # Some paths go on with the name of a model.
        paths = endpoint.path, f"{endpoint.path}/own/model"
        assert endpoint in {PATHS.find(path).endpoint for path in paths}
    checks = ("/ping", "/models/own/model/health", "/models/own/ping")
    assert all(PATHS.find(path).is_public for path in checks)
    others = ("/models/health", "/models/own/healthy", "/own/health", "/models")
    assert not any(PATHS.find(path).is_public for path in others)


def request_with(*headers: tuple[str, bytes]) -> Request:
    return Request({"type": "http", "headers": [(name.encode(), value) for name, value in headers]})


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", JSON),
        ("*/*", JSON),
        (f"{SAFETENSORS}, {JSON};q=0.9", SAFETENSORS),
        (f"{SAFETENSORS};q=0, {JSON};q=0.9", JSON),
        (f"application/json, {SAFETENSORS}", JSON),
        (f"application/json;q=0.1, {SAFETENSORS.upper()}", SAFETENSORS),
        ("application/vnd.safetensors; q=x;;", JSON),
        ("\xe9", JSON),
    ],
)
def test_the_media_type_is_the_most_preferred_of_accept(header: str, expected: str) -> None:
    assert media_type_of(request_with(("accept", header.encode("latin-1")))) == expected


# Without a limit, the parser takes 50 to 100 ms for each of these.
LONG = {
    "accept": b"text/html, application/vnd.safetensors, (" + b"a " * 30_000 + b")",
    "priority": b"u=5, i=(" + b"a " * 30_000 + b")",
}


def test_overlong_preference_headers_are_not_parsed(monkeypatch) -> None:
    """In one line or in several."""
    padding = b"*/*;q=0.1" + b", a/b;q=0.1" * 70
    usual = {"accept": b"text/html, " + padding, "priority": b"u=5"}
    request = request_with(*usual.items())
    assert len(read_preference(request.headers, "accept")) > 700
    read = (_wants_html(request), is_bulk(request))
    assert read == (True, True)
    monkeypatch.setattr(http_sf, "parse", None)
    halves = [(name, half) for name, value in LONG.items() for half in (value[:900], value[900:])]
    for lines in (LONG.items(), halves):
        request = request_with(*lines)
        read = (_wants_html(request), is_bulk(request))
        assert read == (False, False)
        assert media_type_of(request) == JSON


@pytest.mark.parametrize(
    ("header", "read"),
    [
        ("text/html;q=2, a/b;q=nan, c/d;q=0.1234, ;q=1, ,", {}),
        ("text/html;q=x, A/B", {"a/b": 1.0}),
        ("a/b; v=1 ; Q=0.5,c/d;q=1.000, e/f;q=0", {"a/b": 0.5, "c/d": 1.0, "e/f": 0.0}),
        ("(" + "a " * 400 + ")", {"(" + "a " * 399 + "a )": 1.0}),
        # Only as many items are read as a real header has.
        (",".join(f"a/{i}" for i in range(200)), {f"a/{i}": 1.0 for i in range(64)}),
    ],
)
def test_a_malformed_item_of_accept_is_ignored(
    header: str, read: dict[str, float], monkeypatch
) -> None:
    """A parser of structured fields would take half a millisecond for 1,000 characters."""
    monkeypatch.setattr(http_sf, "parse", None)
    assert parse_preferences(header) == read

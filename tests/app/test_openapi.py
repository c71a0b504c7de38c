"""The description in /openapi.json: bodies, limits, errors and locks."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from openapi_spec_validator import OpenAPIV31SpecValidator

from app.main import create_app
from app.openapi import _describe_limits
from app.settings import Settings
from smart_embedder.interface import LoadedModels
from tests.smart_embedder.fakes import FakeModel, FakeReranker, loaded


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(
        Settings(api_token=None, max_sentences_per_request=123, max_rerank_passages=45)
    )


@pytest.fixture(scope="module")
def paths(app: FastAPI) -> dict[str, Any]:
    found: dict[str, Any] = app.openapi()["paths"]
    return found


def schemas_in(body: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a description."""
    if isinstance(body, dict):
        yield body
    values = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
    for value in values:
        yield from schemas_in(value)


def test_the_description_is_valid_openapi(app: FastAPI) -> None:
    """Client generators refuse an invalid one."""
    assert app.openapi()["openapi"].startswith("3.1.")
    assert [error.message for error in OpenAPIV31SpecValidator(app.openapi()).iter_errors()] == []


def test_every_body_is_required_and_a_named_component(app, paths) -> None:
    schemas = app.openapi()["components"]["schemas"]
    bodies = {
        path: operations["post"]["requestBody"]
        for path, operations in paths.items()
        if "requestBody" in operations.get("post", {})
    }
    assert len(bodies) > 15
    for path, body in bodies.items():
        assert body["required"] is True, path
        (name,) = body["content"]["application/json"]["schema"].values()
        assert name.rpartition("/")[2] in schemas, path
    named = {path: schema_of(body) for path, body in bodies.items()}
    assert named["/embeddings/"] == "EmbeddingRequest"
    assert (named["/rerank"], named["/v2/rerank"]) == ("RerankBody", "DocumentsRequest")
    body = schemas["RerankBody"]
    assert (body["type"], body["required"]) == ("object", ["query", "passages"])
    assert schemas["RerankWeights"]["properties"]["dense"]["maximum"] == 1_000_000


def schema_of(body: dict[str, Any]) -> str:
    reference: str = body["content"]["application/json"]["schema"]["$ref"]
    return reference.rpartition("/")[2]


def test_every_operation_id_is_unique_and_has_two_words(paths) -> None:
    ids = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(ids) == len({*ids}) > 25
    assert all(re.fullmatch("[a-z]+_[a-z0-9]+", name) for name in ids)


def test_no_value_is_a_union_of_bare_lists_or_maps(app) -> None:
    """Typed clients generated for such a union do not compile."""
    for schema in schemas_in(app.openapi()):
        members = schema.get("anyOf", schema.get("oneOf", []))
        members = [member for member in members if member.get("type") != "null"]
        if len(members) > 1:
            assert not any(member.get("type") in {"array", "object"} for member in members), schema


def test_work_documents_the_priority_header(paths) -> None:
    for path in ("/rerank", "/embeddings/"):
        (priority,) = (
            parameter
            for parameter in paths[path]["post"]["parameters"]
            if parameter["in"] == "header"
        )
        assert (priority["name"], priority["required"]) == ("Priority", False)
        assert priority["schema"] == {"type": "string", "default": "u=3"}


def test_only_native_lists_have_max_items(app) -> None:
    limits = {
        (name, field): about["maxItems"]
        for name, schema in app.openapi()["components"]["schemas"].items()
        for field, about in schema.get("properties", {}).items()
        if about.get("maxItems") in {123, 45}
    }
    texts = {("EmbeddingRequest", "sentences"): 123, ("ExtractBody", "texts"): 123}
    assert limits == texts | {("RerankBody", "passages"): 45}


def test_work_and_protected_metrics_are_locked() -> None:
    settings = Settings(api_token="a", protect_metrics=True)
    paths = create_app(settings).openapi()["paths"]
    lock = [{"HTTPBearer": []}]
    locked = {
        f"{method} {path}"
        for path, operations in paths.items()
        for method, operation in operations.items()
        if operation.get("security") == lock
    }
    assert {"get /stats", "get /metrics", "get /v1/models"} <= locked
    assert {"post /rerank", "post /embeddings/", "post /", "get /info"} <= locked
    assert not {"get /health", "get /ping", "get /"} & locked
    assert paths["/metrics"]["get"]["summary"] == "Prometheus metrics"


def test_there_are_no_locks_without_a_token_nor_of_open_metrics(app: FastAPI, tmp_path) -> None:
    description = app.openapi()
    assert "securitySchemes" not in description["components"]
    assert not any("security" in schema for schema in schemas_in(description["paths"]))
    (tmp_path / "tokens").write_text("alice:a\n")
    settings = Settings(api_tokens_file=tmp_path / "tokens", protect_metrics=False)
    named = create_app(settings).openapi()["paths"]
    assert "security" in named["/rerank"]["post"]
    assert "security" not in named["/metrics"]["get"]


def lengths(description: str) -> list[list[str]]:
    """The two cells of each row that depends on the models."""
    rows = description.splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:4]] for row in rows if row[:1] == "|"]
    return [own[1:] for own in cells if own[0].startswith(("tokens", "pairs"))]


class Dense(FakeModel):
    name = "dense"
    max_length = 77


class FewPairs(FakeReranker):
    name = "judge"
    max_length = 55
    max_batch_sequences = 4


UNKNOWN, OFF = "known once the models are loaded", "none: reranking is switched off"
BY_FAKE, OF_PAIRS = "100 of a text by fake", "55 of query and passage by judge"
FEW = replace(loaded(FakeModel(), reranker=FewPairs()), max_rerank_tokens=7)
LATE = replace(loaded(FakeModel()), dense=Dense(), late_interaction=True)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (None, [UNKNOWN] * 5),
        (loaded(FakeModel()), [BY_FAKE, OFF, "10", "10", "no limit"]),
        (FEW, [BY_FAKE, OF_PAIRS, "10", "7", "4"]),
        (LATE, [f"77 of a text by dense, {BY_FAKE}", BY_FAKE, "10", "10", "no limit"]),
    ],
)
def test_the_description_has_the_limits_of_loaded_models(
    models: LoadedModels | None, expected: list[str]
) -> None:
    embedding, reranking, tokens, of_reranking, pairs = expected
    rows = lengths(_describe_limits(Settings(), models))
    assert rows == [[embedding, reranking], [tokens, of_reranking], ["", pairs]]

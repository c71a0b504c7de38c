"""The oracle has a rule for every operation in the description, and finds wrong responses."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.main import create_app
from app.settings import Settings
from smart_embedder.models_file import read_model_entries
from tests.app.conftest import serving
from tests.oracle.conformance import check_every_request
from tests.oracle.described import WITHOUT_TRUTH, operations, questions, without_rule
from tests.oracle.rules import Served
from tests.oracle.truth import M3, Classifier, Clip
from tests.support.classifiers import save_token_classifier
from tests.support.formats import JSON
from tests.support.pictures import POSITIONS, save_image_text

# One in so many of the questions with at most one option; scripts/oracle.py asks all.
EVERY = 19


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    return create_app(Settings()).openapi()


@pytest.fixture
def changed(description):
    return copy.deepcopy(description)


def test_every_operation_has_a_rule_or_a_reason(description) -> None:
    assert without_rule(description) == []
    asked = {question.operation.name for question in questions(description)}
    assert asked | WITHOUT_TRUTH.keys() == {operation.name for operation in operations(description)}
    assert all(WITHOUT_TRUTH.values())


def body_of(description, path: str) -> dict[str, Any]:
    content = description["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields: dict[str, Any] = description["components"]["schemas"][name]["properties"]
    return fields


def add_route(description) -> None:
    route = copy.deepcopy(description["paths"]["/rerank"])
    formats = route["post"]["responses"]["200"]["content"]
    formats["application/json"]["schema"] = {"$ref": "#/components/schemas/Summary"}
    description["paths"]["/summarize"] = route


def add_option(description) -> None:
    body_of(description, "/v1/embeddings")["sharpen"] = {"type": "boolean"}


def add_value(description) -> None:
    body_of(description, "/embeddings/")["output_dtype"]["enum"].append("int4")


def add_format(description) -> None:
    answer = description["paths"]["/embeddings/"]["post"]["responses"]["200"]
    answer["content"]["application/cbor"] = {"schema": {"type": "string"}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (add_route, "POST /summarize: no rule for the answer 'Summary'"),
        (add_option, "POST /v1/embeddings: the option sharpen"),
        (add_value, "POST /embeddings/: the value 'int4' of the option output_dtype"),
        (add_format, "POST /embeddings/: application/cbor"),
        (lambda d: d["paths"].pop("/ping"), "GET /ping: is not in the description"),
    ],
)
def test_operations_and_options_without_a_rule_are_named(
    changed, change: Callable[..., None], named: str
) -> None:
    change(changed)
    assert without_rule(changed) == [named]


def test_responses_equal_transformers(server, tiny_m3: Path, description) -> None:
    truth = Served(M3(tiny_m3, 8192), None, None)
    with server.client() as client:
        outcome = check_every_request(client, description, truth, every=EVERY)
    assert outcome.wrong == []
    assert outcome.answers.total() > 100
    assert outcome.refusals > 20


def test_responses_about_pictures_equal_transformers(tmp_path, description) -> None:
    folder = save_image_text(tmp_path / "tiny-clip", "clip")
    truth = Served(Clip(folder, POSITIONS), None, None)
    with serving(embedding_model=str(folder)) as client:
        outcome = check_every_request(client, description, truth, every=EVERY)
    assert outcome.wrong == []
    assert outcome.answers.total() > 60
    assert outcome.refusals > 20


def test_every_option_of_embeddings_equals_transformers(server, tiny_m3: Path, changed) -> None:
    """Only in JSON; the test before covers other formats."""
    changed["paths"] = {"/embeddings/": changed["paths"]["/embeddings/"]}
    answers = changed["paths"]["/embeddings/"]["post"]["responses"]["200"]["content"]
    for other in answers.keys() - {JSON}:
        del answers[other]
    with server.client() as client:
        outcome = check_every_request(client, changed, Served(M3(tiny_m3, 8192), None, None))
    assert outcome.wrong == []
    assert outcome.answers.total() > 60
    assert outcome.refusals > 10


def test_every_option_of_extract_equals_the_pipeline(tmp_path, tiny_m3: Path, changed) -> None:
    folder, models = save_token_classifier(tmp_path / "tiny-ner", "Bert"), tmp_path / "models.yaml"
    models.write_text(f"- name: {folder}\n  task: extract\n", "utf-8")
    paths = ("/extract", "/v1/extract/{model}")
    changed["paths"] = {path: changed["paths"][path] for path in paths}
    served = Served(M3(tiny_m3, 8192), None, None, Classifier(folder))
    with serving(embedding_model=str(tiny_m3), models=read_model_entries(models)) as client:
        outcome = check_every_request(client, changed, served)
    assert outcome.wrong == []
    assert (outcome.answers.total(), outcome.refusals) == (74, 18)


def test_wrong_response_is_named(server, tiny_m3: Path, changed) -> None:
    truth = Served(M3(tiny_m3, 8192), None, None)
    plain = truth.m3.vectors

    def slightly_wrong(text: str, options: Any) -> Any:
        vectors = plain(text, options)
        return dataclasses.replace(vectors, sparse={**vectors.sparse, 5: 0.001})

    truth.m3.vectors = slightly_wrong
    changed["paths"] = {path: changed["paths"][path] for path in ("/embed_sparse", "/embed")}
    with server.client() as client:
        outcome = check_every_request(client, changed, truth)
    assert {line.partition(" (")[0] for line in outcome.wrong} == {"POST /embed_sparse"}
    assert outcome.answers["DenseVectors"] > 5

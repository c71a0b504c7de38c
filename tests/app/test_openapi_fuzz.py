"""Requests generated from the API's description: no 5xx, and every response matches it."""

from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.support.classifiers import save_token_classifier
from tests.support.server import run_server

WORKING = ["/embeddings/", "/rerank", "/extract"]
# Other APIs accept bodies that the description does not allow, and refuse some fields that it
# allows.
FOREIGN = ["/v1/embeddings", "/v1/rerank", "/v2/rerank"]
TEI = ["/embed", "/embed_sparse", "/tokenize"]
FOREIGN += [f"/v1/{work}/{{model}}" for work in ("encode", "score", "extract")]
FOREIGN += ["/", *TEI, "/v1/embed", "/v2/embed", "/api/v1/embed", "/api/embed", "/api/embeddings"]
OF_A_MODEL = [f"/models/{{model}}{path}" for path in ("", *TEI, "/rerank")]
READING = ["/", "/health", "/health/ready", "/health/live", "/stats", "/metrics"]
READING += ["/v1/models", "/v1/models/{model}", "/info", "/ping"]
READING += ["/models/{model}/info", "/models/{model}/health"]
COMMANDS = ["/v1/models/{model}/load", "/v1/models/{model}/unload"]
TOKEN = {"Authorization": "Bearer fuzz"}


@pytest.fixture(scope="module")
def description(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    """The operations of a server with a token, so that requests without one are tested, too."""
    folder = tmp_path_factory.mktemp("fuzz")
    classifier = save_token_classifier(folder / "tiny-ner", "Bert")
    (folder / "models.yaml").write_text(f"- name: {classifier}\n  task: extract\n", "utf-8")
    models = {"EMBEDDING_MODEL": str(tiny_m3), "MODELS": str(folder / "models.yaml")}
    with run_server(folder, API_TOKEN="fuzz", **models) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        assert "Traceback" not in server.log


def try_out(operation, mode: GenerationMode, examples: int, excluded=()) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case) -> None:
        assume(not asks_for_nothing(case.body) and not asks_in_vain(case.body))
        case.call_and_validate(headers=TOKEN, excluded_checks=excluded)

    send()


def asks_for_nothing(body: object) -> bool:
    """Whether a body requests no kind or no weight, which the description cannot exclude."""
    if not isinstance(body, dict):
        return False
    kinds = ("return_dense", "return_sparse", "return_colbert")
    weights = body.get("weights")
    no_weight = isinstance(weights, dict) and len(weights) == 3 and not any(weights.values())
    return no_weight or not (any(body.get(kind, True) for kind in kinds) or body.get("muvera"))


def asks_in_vain(body: object) -> bool:
    """Whether a body requests what the models lack, or options that exclude each other."""
    if not isinstance(body, dict):
        return False
    texts = body.get("sentences") or body.get("passages")
    has_pictures = isinstance(texts, list) and any(isinstance(text, dict) for text in texts)
    unknown = ("instruction", "prompt_name", "input_type", "dimensions", "if_vector_space")
    uncut_from_left = body.get("truncate") is False and body.get("truncation_side") == "left"
    no_tokens = not (body.get("return_sparse", True) or body.get("return_colbert", True))
    strings_of_none = bool(body.get("return_tokens")) and no_tokens
    dense, colbert = body.get("return_dense", True), body.get("return_colbert", True)
    dtype = body.get("output_dtype", "float32")
    half = dtype in ("float16", "bfloat16") and body.get("encoding") != "base64"
    pooled_in_vain = body.get("colbert_pool_factor") is not None and (
        not colbert or body.get("muvera") == "query" or body.get("return_tokens")
    )
    return (
        uncut_from_left
        or half
        or has_pictures
        or isinstance(body.get("colbert_pool_factor"), float)  # JSON Schema has 2.0 as an integer.
        or (dtype != "float32" and not (dense or colbert))
        or pooled_in_vain
        or strings_of_none
        or body.get("prompt") == ""
        or bool(body.get("labels"))
        or any(body.get(field) is not None for field in unknown)
    )


def test_the_fuzzed_operations_are_all_operations(description) -> None:
    found = {result.ok().path for result in description.get_all_operations()}
    assert found == {*WORKING, *FOREIGN, *OF_A_MODEL, *COMMANDS, *READING}


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", WORKING)
def test_responses_of_work_match_the_description(
    description, path: str, mode: GenerationMode
) -> None:
    try_out(description[path]["POST"], mode, examples=15)


# Of two paths with one schema, one.
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", sorted({*FOREIGN} - {"/", "/v1/rerank", "/v1/embed"}))
def test_responses_of_other_apis_match_the_description(
    description, path: str, mode: GenerationMode
) -> None:
    excluded = [negative_data_rejection, positive_data_acceptance]
    try_out(description[path]["POST"], mode, 6, excluded)


@pytest.mark.parametrize("path", [*OF_A_MODEL, *COMMANDS])
def test_responses_for_any_model_name_match_the_description(description, path: str) -> None:
    excluded = [negative_data_rejection, positive_data_acceptance]
    try_out(description[path]["POST"], GenerationMode.POSITIVE, 3, excluded)


@pytest.mark.parametrize("path", READING)
def test_responses_of_get_match_the_description(description, path: str) -> None:
    try_out(description[path]["GET"], GenerationMode.POSITIVE, examples=3 if "{" in path else 1)

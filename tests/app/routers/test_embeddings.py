"""POST /embeddings/ and its options; the oracle checks the numbers."""

import pytest

from app.routers.embeddings import build_request
from app.schemas import EmbeddingRequest
from smart_embedder.requests import EmbedRequest, Outputs, TruncationOptions
from tests.app.conftest import answered
from tests.smart_embedder.fakes import FakeModel, loaded
from tests.support.formats import JSON, SAFETENSORS

KINDS = ("dense", "sparse", "colbert")
NO_KIND = {f"return_{kind}": False for kind in KINDS}


def embed(client, *sentences: str, **options) -> dict:
    return answered(client, "/embeddings/", sentences=sentences, **options)


def test_a_response_has_exactly_the_documented_fields_and_all_kinds(client) -> None:
    answer = embed(client, "hybrid search")
    names = ["model_name", "dense_model_name", "sparse_model_name", "colbert_model_name"]
    rest = ["vector_space", "processing_time_ms", "warnings", "usage", "timings_ms"]
    assert list(answer) == ["data", *names, *rest]
    assert {answer[name] for name in names} == {client.get("/health").json()["model"]}
    assert answer["warnings"] == []
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    timings = answer["timings_ms"]
    assert set(timings) == {"tokenize", "queue", "inference", "total"}
    parts = timings["tokenize"] + timings["queue"] + timings["inference"]
    assert parts == pytest.approx(timings["total"], abs=0.01)
    assert answer["processing_time_ms"] == timings["total"]
    (item,) = answer["data"]
    assert list(item) == ["id", "text", "embeddings"]
    assert (item["id"], item["text"]) == (0, "hybrid search")
    embeddings = item["embeddings"]
    assert list(embeddings) == list(KINDS)
    assert len(embeddings["dense"]) == 64
    assert all(isinstance(key, str) and weight > 0 for key, weight in embeddings["sparse"].items())
    rows = answer["usage"]["prompt_tokens"] - 1
    assert [len(vector) for vector in embeddings["colbert"]] == [64] * rows


def test_a_kind_that_is_not_requested_is_null(client) -> None:
    for kind in KINDS:
        options = {f"return_{other}": other == kind for other in KINDS}
        embeddings = embed(client, "search", **options)["data"][0]["embeddings"]
        assert list(embeddings) == list(KINDS)
        assert [other for other in KINDS if embeddings[other] is not None] == [kind]


# Options.


def test_all_options_reach_the_engine() -> None:
    options = {"normalize_dense": True, "prompt_name": "code", "dimensions": 32, "muvera": "query"}
    options |= {"input_type": "document", "prompt": "to find: ", "return_tokens": True}
    options |= {"output_dtype": "int8"}
    kinds = {"return_sparse": False, "return_colbert": False}

    def built(**fields) -> EmbedRequest:
        body = EmbeddingRequest.model_validate({"sentences": ["a"]} | fields)
        return build_request(body, ["a"], loaded(FakeModel()), JSON)

    left = TruncationOptions(side="left")
    expected = EmbedRequest(["a"], Outputs(dense=True), truncation=left, **options)
    assert built(**options, **kinds, truncation_side="left") == expected
    pooled = built(dimensions=32, colbert_pool_factor=2)
    assert (pooled.normalize_dense, pooled.colbert_pool_factor) == (True, 2)
    assert pooled.outputs == Outputs(True, True, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # The engine's errors: tests/smart_embedder/pipelines/test_validation.py.
        ({"input_type": "classification"}, "14 characters: send 'query' or 'document'"),
        ({"colbert_pool_factor": 1}, "colbert_pool_factor is out of range: send at leas"),
        ({"dimensions": 32.5}, "The field dimensions is a number: send a whole number"),
        ({"truncate": False, "truncation_side": "left"}, "no effect without truncate"),
        ({"task": "search"}, "There is no field task here: did you mean prompt?"),
        ({"output_dtype": "float16"}, "JSON numbers cannot hold"),
        ({"output_dtype": "bfloat16"}, f"or ask for {SAFETENSORS} in Accept"),
        (NO_KIND, "No output is requested"),
    ],
    ids=str,
)
def test_an_invalid_option_is_422_with_a_reason(client, options, message) -> None:
    response = client.post("/embeddings/", json={"sentences": ["a"]} | options)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
    assert message in response.json()["detail"]


def test_base64_with_safetensors_is_422(client) -> None:
    body = {"sentences": ["a"], "encoding": "base64"}
    response = client.post("/embeddings/", json=body, headers={"Accept": SAFETENSORS})
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
    assert "The option encoding is for JSON" in response.json()["detail"]

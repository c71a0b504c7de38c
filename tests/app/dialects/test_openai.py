"""OpenAI's API: the vectors of the native endpoint in OpenAI's form."""

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.dialects.fields import TASKS, Task
from app.dialects.openai import OpenAIEmbeddingRequest, VectorFormat
from smart_embedder.errors import InvalidRequestError
from smart_embedder.requests import TruncationOptions
from tests.app.conftest import answered
from tests.app.dialects.conftest import dense, native
from tests.support.texts import varied_texts

TEXTS = varied_texts(9)


def post(client, path: str = "/v1/embeddings", **body) -> dict:
    return answered(client, path, **body)


def vectors(client, **body) -> list:
    return [item["embedding"] for item in post(client, **{"input": TEXTS} | body)["data"]]


def assert_error(answer, status: int, code: str) -> dict:
    body = answer.json()
    error = body["error"]
    assert body["detail"] == error["message"]  # Voyage's clients read it.
    assert (answer.status_code, error["code"]) == (status, code)
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"].endswith(".")
    return error


def test_a_response_has_openais_fields_and_the_native_vectors_to_the_last_bit(
    client, tiny_m3
) -> None:
    expected = np.array(dense(client, TEXTS), np.float32)
    answer = post(client, input=TEXTS, model=tiny_m3.name)
    assert list(answer) == ["object", "data", "model", "usage"]
    assert (answer["object"], answer["model"]) == ("list", tiny_m3.name)
    assert [list(item) for item in answer["data"]] == [["object", "index", "embedding"]] * 9
    assert [item["index"] for item in answer["data"]] == list(range(9))
    assert answer["usage"] == answered(client, "/embeddings/", sentences=TEXTS)["usage"]
    floats = [item["embedding"] for item in answer["data"]]
    np.testing.assert_array_equal(np.array(floats, np.float32), expected)
    for path in ("/embeddings", "/embeddings/"):
        assert post(client, path, input=TEXTS, model=tiny_m3.name) == answer
    packed = vectors(client, encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in packed]
    np.testing.assert_array_equal(decoded, expected)


def test_2048_texts_are_allowed_whatever_the_limit_of_the_native_endpoint(full) -> None:
    texts = [{"text": text} for text in TEXTS[:4] * 512]
    embedded = vectors(full, input=texts)
    assert len(embedded) == 2048
    np.testing.assert_allclose(embedded[-4:], dense(full, TEXTS[:4]), atol=1e-6)
    refused = full.post("/v1/embeddings", json={"input": [*texts, "a"]})
    message = assert_error(refused, 400, "invalid_request")["message"]
    assert "2049 texts, and at most 2048 are allowed (MAX_SENTENCES_PER_REQUEST)" in message
    # The limit of the native endpoint is 40.
    answer = full.post("/embeddings/", json={"sentences": ["a"] * 41})
    assert answer.status_code == 422


REFUSED = [
    {"dimensions": 32}, {"prompt_name": "query"}, {"prompt": ""},
    # vLLM's.
    {"truncate_prompt_tokens": 8}, {"add_special_tokens": False}, {"endianness": "big"},
    {"embed_dtype": "float16"}, {"padding": "max_length"}, {"encoding_format": "bytes"},
    {"messages": [{"role": "user", "content": "a"}]},
    # Jina's.
    {"late_chunking": "true"}, {"return_multivector": True}, {"task": "image"},
    {"embedding_type": ["float", "int4"]},
    # NVIDIA's, Azure's, Nomic's and Mixedbread's.
    {"modality": ["text", "image"]}, {"input_type": "image"}, {"long_text_mode": "mean"},
    {"max_tokens_per_text": 9}, {"task_type": "other"}, {"encoding_format": "float16"},
    {"instruction": "Find it"}, {"output_dtype": "int4"}, {"instruct": "Find it"},
    {"normalize": True, "use_activation": False}, {"dimensions": 64, "output_dimension": 32},
    {"colbert_pool_factor": 2}, {"colbert_pool_factor": 1, "return_colbert": True},
]  # fmt: skip


@pytest.mark.parametrize("extra", REFUSED, ids=str)
def test_an_unsupported_option_that_would_change_the_vectors_is_400(client, extra) -> None:
    refused = client.post("/v1/embeddings", json={"input": "a"} | extra)
    assert next(iter(extra)) in assert_error(refused, 400, "invalid_request")["message"]


IGNORED = [
    {"drop_params": True, "user": "me", "model": None, "n": [1], "parameters": {}},
    {"embedding_type": ["float"], "task": "retrieval.query", "normalized": True, "truncate": "end"},
    {"truncate_prompt_tokens": -1, "late_chunking": "False", "endianness": "native"},
    {"truncate_prompt_tokens": 2048, "instruct": None},
    {"embed_dtype": "float32", "add_special_tokens": True, "dimensionality": 64},
    {"modality": ["text"] * 9, "messages": [], "padding": "do_not_pad", "instruction": ""},
    {"long_text_mode": "truncate", "truncation": "true", "truncation_side": "right"},
    # This model has only vectors of unit length.
    {"normalize": False, "use_activation": False},
]  # fmt: skip


def test_ignored_options_change_nothing(client) -> None:
    expected = post(client, input=TEXTS)
    for extra in IGNORED:
        assert post(client, input=TEXTS, **extra) == expected, extra


@pytest.mark.parametrize("dtype", ["int8", "ubinary"])
def test_fewer_bits_and_further_kinds_are_the_native_ones(client, dtype) -> None:
    options = {"output_dtype": dtype, "colbert_pool_factor": 2, "muvera": "document"}
    answer = post(client, input=TEXTS, return_sparse=True, return_colbert="true", **options)["data"]
    packed = vectors(client, encoding_format="base64", embedding_type=dtype)
    for item, raw, expected in zip(answer, packed, native(client, TEXTS, **options), strict=True):
        assert item["embedding"] == expected["dense"]
        assert item.get("scale") == expected.get("dense_scale")
        for name in ("sparse", "colbert", "colbert_scale", "muvera"):
            assert item.get(name) == expected.get(name)
        numbers = np.frombuffer(base64.b64decode(raw), np.uint8 if dtype == "ubinary" else np.int8)
        assert numbers.tolist() == expected["dense"]


def test_several_types_are_an_object_with_a_vector_of_each(client) -> None:
    types = ["float", "int8"]
    several = post(client, input=TEXTS, embedding_type=types)["data"]
    int8 = post(client, input=TEXTS, output_dtype="int8")["data"]
    for item, vector, alone in zip(several, vectors(client), int8, strict=True):
        assert item["embedding"] == {"float": vector, "int8": alone["embedding"]}
        assert item["scale"] == alone["scale"]


@pytest.mark.parametrize(
    ("options", "native_options"),
    [
        ({"prompt": "hybrid "}, {"prompt": "hybrid "}),
        ({"prompt_name": "query"}, {"prompt_name": "query"}),
        ({"task": "code.query"}, {"input_type": "query"}),
        ({"task_type": "passage"}, {"input_type": "document"}),
        ({"use_activation": False}, {"normalize_dense": False}),
        ({"normalized": False}, {"normalize_dense": False}),
        ({"truncate": "START"}, {"truncation_side": "left"}),
        ({"dimensionality": 32, "output_dimension": 32}, {"dimensions": 32}),
    ],
    ids=str,
)
def test_options_are_those_of_the_native_endpoint(full, options, native_options) -> None:
    texts = [*TEXTS[:3], "bread " + "search " * 600 + "kitchen"]
    assert vectors(full, input=texts, **options) == dense(full, texts, **native_options)


def test_truncation_of_a_long_text_is_reported_or_refused(full) -> None:
    body = {"input": ["short", "search " * 400], "model": "tiny-m3"}
    (warning,) = post(full, **body)["warnings"]
    assert warning["target"] == {"field": "input", "index": 1, "pointer": "/input/1"}
    refused = full.post("/v1/embeddings", json=body | {"truncation": False})
    assert assert_error(refused, 400, "text_too_long")["param"] == "input"


@pytest.mark.parametrize(
    ("body", "code", "param", "message"),
    [
        ({}, "invalid_request", "input", "input"),
        ({"texts": ["a"]}, "invalid_request", "input", "rename texts to input"),
        ({"input": []}, "empty_input", None, "empty"),
        ({"input": ["a", 1]}, "invalid_request", "input", "input"),
        ({"input": [[1], [2]]}, "invalid_request", "input", "check_embedding_ctx_length=False"),
        ([], "invalid_request", None, "list"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_an_invalid_body_is_400_and_names_the_parameter(client, body, code, param, message) -> None:
    error = assert_error(client.post("/v1/embeddings", json=body), 400, code)
    assert error["param"] == param
    assert message in error["message"]


def test_a_model_is_chosen_by_any_of_its_names(full, client, tiny_m3) -> None:
    answer = post(full, input=TEXTS, model="text-embedding-3-small")
    assert answer["model"] == "tiny-qwen"
    assert [item["embedding"] for item in answer["data"]] == dense(full, TEXTS)
    answer = post(full, input=TEXTS, model="tiny-m3-embed", return_sparse=True)
    assert answer["model"] == tiny_m3.name
    embedded = [item["embedding"] for item in answer["data"]]
    np.testing.assert_allclose(embedded, dense(client, TEXTS), rtol=0, atol=1e-6)
    assert all(item["sparse"]["indices"] for item in answer["data"] if TEXTS[item["index"]].strip())


def test_azures_paths_take_the_model_of_the_deployment_and_api_key(full) -> None:
    by_key = {"api-key": full.headers["Authorization"].split()[1], "Authorization": ""}
    for path, body in (
        ("/openai/deployments/tiny-m3/embeddings?api-version=2024-10-21", {"model": "whatever"}),
        ("/openai/v1/embeddings?api-version=v1", {"model": "tiny-m3"}),
    ):
        answer = full.post(path, json={"input": TEXTS} | body, headers=by_key)
        assert answer.json()["model"] == "tiny-m3"
        found = [item["embedding"] for item in answer.json()["data"]]
        assert found == dense(full, TEXTS, model="tiny-m3")
    for path, code in (("nobody", "model_not_found"), ("tiny-reranker", "invalid_request")):
        refused = full.post(f"/openai/deployments/{path}/embeddings", json={"input": "a"})
        assert_error(refused, 404 if code == "model_not_found" else 400, code)


@pytest.mark.parametrize("name", ["tiny-reranker", "x" * 5000])
def test_an_unknown_model_is_404_and_the_error_lists_the_known_ones(full, name) -> None:
    refused = full.post("/v1/embeddings", json={"input": "a", "model": name})
    error = assert_error(refused, 404, "model_not_found")
    assert "text-embedding-3-small" in error["message"]
    assert len(error["message"]) < 1000


def test_v1_models_lists_and_finds_every_name_of_a_model(full) -> None:
    for path in ("/v1/models", "/v1/models/", "/models"):
        answer = full.get(path).json()
        assert answer["object"] == "list"
        assert [item["id"] for item in answer["data"]] == [
            *("tiny-m3", "tiny-m3-embed", "tiny-qwen", "tiny-qwen-embed", "text-embedding-3-small"),
            *("tiny-reranker", "rerank-v3.5"),
        ]
        assert {item["object"] for item in answer["data"]} == {"model"}
        assert all(isinstance(item["created"], int) for item in answer["data"])
    for path in ("/v1/models/rerank-v3.5", "/models/rerank-v3.5"):
        assert full.get(path).json() == answer["data"][-1]
    assert_error(full.get("/v1/models/BAAI/bge-m3"), 404, "model_not_found")


# Fields with several names, and fields that affect each other.


def body(**fields: Any) -> OpenAIEmbeddingRequest:
    return OpenAIEmbeddingRequest.model_validate({"input": "a"} | fields)


SEVERAL = ["int8", "float"]
FLOATS, INT8 = VectorFormat("float32", as_base64=False), VectorFormat("int8", as_base64=False)
BASE64, BOTH = replace(FLOATS, as_base64=True), replace(FLOATS, types=("int8", "float"))
QUERY = Task("query", ("retrieval.query", "Retrieval-query", "search_query"))
CLASSIFIED = Task("document", ("classification", "Classification"))
RIGHT, LEFT, UNCUT = TruncationOptions(), TruncationOptions(side="left"), TruncationOptions(False)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("vector_format", {}, FLOATS),
        ("vector_format", {"encoding_format": "float"}, FLOATS),
        ("vector_format", {"encoding_format": "base64"}, BASE64),
        ("vector_format", {"embedding_type": ["base64"]}, BASE64),
        ("vector_format", {"encoding_format": ["int8"], "output_dtype": "int8"}, INT8),
        # Clients send float or base64 by default, even with another type in another field.
        ("vector_format", {"encoding_format": "float", "output_dtype": "int8"}, INT8),
        (
            "vector_format",
            {"encoding_format": "base64", "output_dtype": "int8"},
            replace(INT8, as_base64=True),
        ),
        ("vector_format", {"embedding_type": [*SEVERAL, "int8"]}, BOTH),
        (
            "vector_format",
            {"embedding_type": SEVERAL, "encoding_format": "base64"},
            replace(BOTH, as_base64=True),
        ),
        ("merged_task", {"task": "text-matching"}, TASKS["text-matching"]),
        ("merged_task", {"input_type": "document", "task": "classification"}, CLASSIFIED),
        (
            "merged_task",
            {"input_type": "query", "task_type": "search_query", "task": "retrieval.query"},
            QUERY,
        ),
        ("truncation_options", {}, RIGHT),
        ("truncation_options", {"truncate": "none"}, UNCUT),
        ("truncation_options", {"truncation_strategy": "start"}, LEFT),
    ],
)
def test_fields_of_several_names_are_merged(name: str, fields, expected) -> None:
    assert getattr(body(**fields), name) == expected


DIFFER = "output_dtype differ"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("vector_format", {"encoding_format": "float", "embedding_type": "base64"}, DIFFER),
        ("vector_format", {"encoding_format": "base64", "embedding_type": "float"}, DIFFER),
        ("vector_format", {"encoding_format": "int8", "embedding_type": "uint8"}, DIFFER),
        ("vector_format", {"embedding_type": "int8", "output_dtype": "binary"}, DIFFER),
        ("vector_format", {"embedding_type": SEVERAL, "output_dtype": "int8"}, DIFFER),
        ("vector_format", {"embedding_type": SEVERAL, "encoding_format": SEVERAL}, DIFFER),
        (
            "vector_format",
            {"embedding_type": SEVERAL, "return_colbert": True},
            "return_colbert and embed",
        ),
        ("merged_task", {"task": "sing"}, "the field task is unknown: send text, query, document"),
        ("merged_task", {"input_type": "query", "task": "passage"}, "task and task_type differ"),
        ("truncation_options", {"truncate": "END", "truncation": False}, "the same and differ"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(name: str, fields, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        getattr(body(**fields), name)

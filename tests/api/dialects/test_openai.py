"""OpenAI's embeddings and models: the native endpoint's numbers in OpenAI's shape."""

import base64

import numpy as np
import pytest

from tests.api.conftest import answered
from tests.api.dialects.conftest import dense, native
from tests.support.texts import varied_texts

TEXTS = varied_texts(9)


def post(client, path: str = "/v1/embeddings", **body) -> dict:
    return answered(client, path, **body)


def vectors(client, **body) -> list:
    return [item["embedding"] for item in post(client, **{"input": TEXTS} | body)["data"]]


def assert_error(answer, status: int, code: str) -> dict:
    body = answer.json()
    error = body["error"]
    # Clients of text-embeddings-inference look for these beside `error`.
    assert {name: body[name] for name in ("message", "type", "code")}.items() <= error.items()
    assert body["detail"] == error["message"]  # Which Voyage's clients look for.
    assert (answer.status_code, error["code"]) == (status, code)
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"].endswith(".")
    return error


def test_an_answer_has_openais_fields_and_true_counts(client, tiny_m3) -> None:
    answer = post(client, input=TEXTS, model=tiny_m3.name)
    assert list(answer) == ["object", "data", "model", "usage"]
    assert (answer["object"], answer["model"]) == ("list", tiny_m3.name)
    assert [list(item) for item in answer["data"]] == [["object", "index", "embedding"]] * 9
    assert [item["index"] for item in answer["data"]] == list(range(9))
    counted = client.post("/embeddings/", json={"sentences": TEXTS}).json()["usage"]
    assert answer["usage"] == counted


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/embeddings/"])
def test_vectors_are_the_native_ones_to_the_last_bit_in_either_encoding(client, path) -> None:
    expected = np.array(dense(client, TEXTS), np.float32)
    floats = vectors(client, path=path, encoding_format="float")
    np.testing.assert_array_equal(np.array(floats, np.float32), expected)
    packed = vectors(client, path=path, encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in packed]
    np.testing.assert_array_equal(decoded, expected)


def test_a_text_may_be_an_object(client) -> None:
    objects = [{"text": text, "id": str(i)} for i, text in enumerate(TEXTS[:4])]
    assert post(client, input=[*objects, *TEXTS[4:]]) == post(client, input=TEXTS)
    assert post(client, input={"text": "search"}) == post(client, input="search")
    for other in ({"image": "a"}, {"text": "a", "image": "b"}):
        refused = client.post("/v1/embeddings", json={"input": [other]})
        assert assert_error(refused, 400, "invalid_request")["param"] == "input"


def test_2048_texts_are_read_whatever_the_limit_of_the_native_endpoint(full) -> None:
    texts = TEXTS[:4] * 512
    made = vectors(full, input=texts)
    assert len(made) == 2048
    np.testing.assert_allclose(made[-4:], dense(full, TEXTS[:4]), atol=1e-6)
    objects = [{"text": text} for text in texts]
    assert len(post(full, "/embeddings", input=objects)["data"]) == 2048
    refused = full.post("/v1/embeddings", json={"input": [*texts, "a"]})
    message = assert_error(refused, 400, "invalid_request")["message"]
    assert "2049 texts, and at most 2048 are allowed (MAX_SENTENCES_PER_REQUEST)" in message
    # Its limit is 40.
    assert full.post("/embeddings/", json={"sentences": ["a"] * 41}).status_code == 422


def test_sparse_and_colbert_come_beside_the_embedding_where_asked_for(client) -> None:
    answer = post(client, input=TEXTS, return_sparse=True, return_colbert="true")
    for item, expected in zip(answer["data"], native(client, TEXTS), strict=True):
        assert item["sparse"] == expected["sparse"]
        assert item["colbert"] == expected["colbert"]


REFUSED = [
    {"dimensions": 32}, {"dimensions": 65},
    # vLLM's.
    {"truncate_prompt_tokens": 8}, {"add_special_tokens": False}, {"endianness": "big"},
    {"embed_dtype": "float16"}, {"padding": "max_length"}, {"encoding_format": "bytes"},
    {"messages": [{"role": "user", "content": "a"}]},
    # Jina's.
    {"late_chunking": "true"}, {"return_multivector": True}, {"task": "image"},
    {"embedding_type": "int4"}, {"embedding_type": ["float", "int4"]},
    # NVIDIA's, Azure's, Nomic's and Mixedbread's.
    {"modality": "image"}, {"modality": ["text", "image"]}, {"input_type": "image"},
    {"long_text_mode": "mean"}, {"max_tokens_per_text": 9}, {"task_type": "other"},
    {"encoding_format": "float16"}, {"instruction": "Find it"},
    {"output_dtype": "int4"}, {"truncate": "MIDDLE"}, {"prompt": ""},
    {"prompt_name": "query"}, {"truncation_side": "left", "truncate": False},
    {"truncate": True, "truncation": False}, {"truncation_side": "left", "truncate": "end"},
    {"normalize": True, "use_activation": False},
    {"dimensions": 64, "output_dimension": 32},
    {"colbert_pool_factor": 2}, {"colbert_pool_factor": 1, "return_colbert": True},
    {"colbert_pool_factor": 2, "return_colbert": True, "input_type": "query"},
    {"muvera": "both"},
]  # fmt: skip


@pytest.mark.parametrize("extra", REFUSED, ids=str)
def test_what_would_change_the_numbers_and_cannot_be_had_is_an_error(client, extra) -> None:
    refused = client.post("/v1/embeddings", json={"input": "a"} | extra)
    assert next(iter(extra)) in assert_error(refused, 400, "invalid_request")["message"]


SERVED_ANYHOW = [
    {"drop_params": True, "user": "me", "model": None, "n": [1]},
    {"embedding_type": "float"}, {"embedding_type": ["float"]}, {"output_dtype": "float"},
    {"task": "retrieval.query"}, {"normalized": True}, {"truncate": True}, {"truncate": "end"},
    {"truncation": "true", "truncate": True}, {"truncation_side": "right"},
    {"truncate_prompt_tokens": -1, "late_chunking": False, "endianness": "native"},
    {"embed_dtype": "float32", "add_special_tokens": True, "dimensions": 64},
    {"drop_params": True, "modality": "text", "parameters": {}},
    {"modality": ["text"] * 9, "messages": [], "padding": "do_not_pad", "instruction": ""},
    {"long_text_mode": "truncate", "dimensionality": 64, "late_chunking": "False"},
    # Of a model that makes vectors of unit length, and no others.
    {"normalize": False}, {"normalized": False}, {"use_activation": False},
]  # fmt: skip


@pytest.mark.parametrize("extra", SERVED_ANYHOW, ids=str)
def test_what_is_served_anyhow_changes_nothing(client, extra) -> None:
    assert post(client, input=TEXTS, **extra) == post(client, input=TEXTS)


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("field", ["embedding_type", "output_dtype"])
def test_fewer_bits_are_the_native_ones(client, field, kind) -> None:
    expected = native(client, TEXTS, output_dtype=kind, return_sparse=False)
    answer = post(client, input=TEXTS, return_colbert=True, **{field: kind})["data"]
    packed = vectors(client, encoding_format="base64", **{field: kind})
    for item, raw, ours in zip(answer, packed, expected, strict=True):
        assert item["embedding"] == ours["dense"]
        assert item.get("scale") == ours.get("dense_scale")
        assert item["colbert"] == ours["colbert"]
        assert item.get("colbert_scale") == ours.get("colbert_scale")
        dtype = np.uint8 if kind.startswith("u") else np.int8
        assert np.frombuffer(base64.b64decode(raw), dtype).tolist() == ours["dense"]


def test_fewer_vectors_are_the_native_ones(client) -> None:
    options = {"colbert_pool_factor": 2, "muvera": "document", "return_colbert": True}
    expected = native(client, TEXTS, return_sparse=False, **options)
    answer = post(client, input=TEXTS, **options)["data"]
    alone = post(client, input=TEXTS, muvera="document", encoding_format="base64")["data"]
    for item, muvera, ours in zip(answer, alone, expected, strict=True):
        assert (item["colbert"], item["muvera"]) == (ours["colbert"], ours["muvera"])
        assert muvera["muvera"] == item["muvera"]
        assert list(muvera) == ["object", "index", "embedding", "muvera"]


@pytest.mark.parametrize("field", ["encoding_format", "embedding_type"])
@pytest.mark.parametrize("packed", [False, True])
def test_of_several_types_each_is_that_of_a_request_for_it(client, field, packed) -> None:
    types = ["float", "base64", "int8", "uint8", "binary", "ubinary"]
    other = {"embedding_type", "encoding_format"} - {field}
    extra = dict.fromkeys(other, "base64") if packed else {}
    answer = post(client, input=TEXTS, **{field: types}, **extra)["data"]
    for kind in types:
        only = {"output_dtype": kind} if kind not in {"float", "base64"} else {}
        if packed or kind == "base64":
            only["encoding_format"] = "base64"
        alone = post(client, input=TEXTS, **only)["data"]
        for item, single in zip(answer, alone, strict=True):
            assert list(item["embedding"]) == types
            assert item["embedding"][kind] == single["embedding"]
            assert single.get("scale") in {None, item["scale"]}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"prompt": "hybrid "}, {"prompt": "hybrid "}),
        ({"prompt_name": "query"}, {"prompt_name": "query"}),
        *(
            ({name: task}, {"input_type": kind})
            for name in ("input_type", "task", "task_type")
            for task, kind in (("code.query", "query"), ("passage", "document"), ("text", None))
        ),
        ({"normalized": False}, {"normalize_dense": False}),
        ({"use_activation": False}, {"normalize_dense": False}),
        ({"truncate": "START"}, {"truncation_side": "left"}),
        ({"truncation_strategy": "start"}, {"truncation_side": "left"}),
        ({"truncation_side": "left"}, {"truncation_side": "left"}),
        ({"truncate": "END"}, {}),
        *(
            ({name: 32}, {"dimensions": 32})
            for name in ("dimensions", "output_dimension", "dimensionality")
        ),
    ],
    ids=str,
)
def test_options_are_those_of_the_native_endpoint(full, theirs, ours) -> None:
    texts = [*TEXTS, "bread " + "search " * 600 + "kitchen"]
    assert vectors(full, input=texts, **theirs) == dense(full, texts, **ours)


def test_the_raw_vector_may_be_cut(full) -> None:
    raw = vectors(full, normalize=False)
    assert vectors(full, normalize=False, dimensions=32) == [each[:32] for each in raw]


@pytest.mark.parametrize(
    "extra", [{"truncate": False}, {"truncation": False}, {"truncate": "none"}]
)
def test_a_text_that_is_too_long_is_an_error_where_it_may_not_be_cut(full, extra) -> None:
    body = {"input": ["short", "search " * 400], "model": "tiny-m3"} | extra
    error = assert_error(full.post("/v1/embeddings", json=body), 400, "text_too_long")
    assert error["param"] == "input"


def test_a_text_that_was_cut_is_reported(client) -> None:
    (warning,) = post(client, input=["short", "search " * 9000])["warnings"]
    assert warning["target"] == {"field": "input", "index": 1, "pointer": "/input/1"}


@pytest.mark.parametrize(
    ("body", "code", "param", "said"),
    [
        ({}, "invalid_request", "input", "input"),
        *(
            ({name: ["a"]}, "invalid_request", "input", f"and {name} is none: call it input")
            for name in ("inputs", "texts", "sentences")
        ),
        ({"input": []}, "empty_input", None, "empty"),
        ({"input": None}, "invalid_request", "input", "null"),
        ({"input": ["a", 1]}, "invalid_request", "input", "input"),
        ({"input": [True]}, "invalid_request", "input", "input"),
        ({"input": [[1] * 200] * 300}, "invalid_request", None, "check_embedding_ctx_length=False"),
        ({"input": [[1], [2]]}, "invalid_request", "input", "check_embedding_ctx_length=False"),
        (
            {"input": "a", "encoding_format": "hex"},
            "invalid_request",
            "encoding_format",
            "field encoding_format is a string of 3 characters: send 'base64', 'float'",
        ),
        ([], "invalid_request", None, "list"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_a_wrong_body_is_400_and_names_the_parameter(client, body, code, param, said) -> None:
    error = assert_error(client.post("/v1/embeddings", json=body), 400, code)
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize("name", ["TINY-QWEN", "text-embedding-3-small", ""])
def test_every_name_of_the_dense_model_is_answered_by_it(full, name) -> None:
    answer = post(full, input=TEXTS, model=name)
    assert answer["model"] == "tiny-qwen"
    assert [item["embedding"] for item in answer["data"]] == dense(full, TEXTS)


def test_the_other_embedding_model_makes_its_own_dense_vectors(full, client, tiny_m3) -> None:
    answer = post(full, input=TEXTS, model="tiny-m3-embed", return_sparse=True)
    assert answer["model"] == tiny_m3.name
    made = [item["embedding"] for item in answer["data"]]
    np.testing.assert_allclose(made, dense(client, TEXTS), rtol=0, atol=1e-6)
    assert all(item["sparse"]["indices"] for item in answer["data"] if TEXTS[item["index"]].strip())


@pytest.mark.parametrize("name", ["text-embedding-ada-002", "tiny-reranker", "x" * 5000])
def test_an_unknown_model_is_404_and_told_the_known_ones(full, name) -> None:
    refused = full.post("/v1/embeddings", json={"input": "a", "model": name})
    error = assert_error(refused, 404, "model_not_found")
    assert "text-embedding-3-small" in error["message"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/models"])
def test_the_list_of_models_has_every_name(full, path) -> None:
    answer = full.get(path).json()
    assert answer["object"] == "list"
    assert [item["id"] for item in answer["data"]] == [
        *("tiny-m3", "tiny-m3-embed", "tiny-qwen", "tiny-qwen-embed", "text-embedding-3-small"),
        *("tiny-reranker", "rerank-v3.5"),
    ]
    assert {item["object"] for item in answer["data"]} == {"model"}
    assert all(isinstance(item["created"], int) for item in answer["data"])


def test_one_model_is_found_by_each_of_its_names(full) -> None:
    assert full.get("/v1/models/rerank-v3.5").json()["id"] == "rerank-v3.5"
    assert_error(full.get("/v1/models/BAAI/bge-m3"), 404, "model_not_found")

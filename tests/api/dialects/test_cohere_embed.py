"""Cohere's vectors: the native ones, and the same in fewer bits."""

import base64

import numpy as np
import pytest

from tests.api.conftest import answered
from tests.api.dialects.conftest import dense, native
from tests.support.texts import varied_texts

TEXTS = varied_texts(9)
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def post(client, path: str = "/v2/embed", **body) -> dict:
    return answered(client, path, **{"texts": TEXTS} | body)


def assert_error(answer, status: int, code: str) -> str:
    error = answer.json()
    assert (answer.status_code, error["code"]) == (status, code), error
    return error["message"]


def test_vectors_are_the_native_ones_and_in_version_1_a_list(client) -> None:
    answer = post(client, input_type="search_document", embedding_types=["float"])
    assert list(answer) == ["id", "embeddings", "texts", "meta", "response_type"]
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["embeddings"] == {"float": dense(client, TEXTS)}
    assert answer["texts"] == TEXTS
    counted = answered(client, "/embeddings/", sentences=TEXTS)["usage"]
    assert answer["meta"]["billed_units"] == {"input_tokens": counted["total_tokens"]}
    assert post(client)["embeddings"] == answer["embeddings"]
    plain = post(client, "/v1/embed")
    assert plain["embeddings"] == answer["embeddings"]["float"]
    assert plain["response_type"] == "embeddings_floats"
    typed = post(client, "/v1/embed", embedding_types=["float"])
    assert typed["response_type"] == "embeddings_by_type"
    assert typed["embeddings"] == answer["embeddings"]


def test_every_type_is_of_the_same_vectors(client) -> None:
    made = post(client, embedding_types=TYPES)["embeddings"]
    assert list(made) == TYPES
    decoded = [np.frombuffer(base64.b64decode(each), "<f4") for each in made.pop("base64")]
    np.testing.assert_array_equal(decoded, np.array(made.pop("float"), np.float32))
    for kind, vectors in made.items():
        assert vectors == [each["dense"] for each in native(client, TEXTS, output_dtype=kind)]


def test_queries_get_the_models_prompt_where_it_has_one(full, client) -> None:
    as_queries = dense(full, TEXTS, input_type="query")
    assert post(full, input_type="search_query")["embeddings"] == {"float": as_queries}
    assert as_queries != dense(full, TEXTS)
    for other in ("search_document", "classification", "clustering", None):
        assert post(full, input_type=other)["embeddings"] == {"float": dense(full, TEXTS)}
    assert post(client, input_type="search_query")["embeddings"] == post(client)["embeddings"]
    fewer = post(full, output_dimension=32)["embeddings"]["float"]
    assert fewer == dense(full, TEXTS, dimensions=32)


def test_inputs_of_one_text_each_are_texts(client) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    answer = answered(client, "/v2/embed", inputs=inputs)
    assert (answer["texts"], answer["embeddings"]) == (TEXTS, {"float": dense(client, TEXTS)})
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    for parts in ([image], [*inputs[0]["content"], image], [*inputs[0]["content"]] * 2, [], 1):
        refused = client.post("/v2/embed", json={"inputs": [*inputs, {"content": parts}]})
        assert "field inputs, only content" in assert_error(refused, 400, "invalid_request")


def test_a_text_that_is_too_long_is_cut_where_it_says(full) -> None:
    body = {"texts": ["bread " + "search " * 400 + "kitchen"], "model": "tiny-m3"}
    refused = full.post("/v2/embed", json=body | {"truncate": "NONE"})
    message = assert_error(refused, 400, "text_too_long")
    assert message.endswith("shorten it, or let the option truncate cut it.")
    start, end = (post(full, **body, truncate=side)["embeddings"] for side in ("START", "end"))
    assert start != end
    assert post(full, **body)["embeddings"] == end
    short = body | {"texts": ["bread search search search search"]}
    assert post(full, **body, max_tokens=5)["embeddings"] == post(full, **short)["embeddings"]


@pytest.mark.parametrize(
    ("body", "status", "code", "said"),
    [
        ({"texts": []}, 400, "empty_input", "texts is empty"),
        ({"texts": None}, 400, "invalid_request", "texts"),
        ({"texts": ["a"] * 41}, 400, "invalid_request", "MAX_SENTENCES_PER_REQUEST"),
        ({"embedding_types": ["int4"]}, 400, "invalid_request", "embedding_types"),
        ({"input_type": "image"}, 400, "invalid_request", "input_type"),
        ({"images": ["data:"]}, 400, "invalid_request", "images"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, 400, "invalid_request", ""),
        ({"truncate": "MIDDLE"}, 400, "invalid_request", "truncate"),
        ({"output_dimension": 32, "model": "tiny-m3"}, 400, "invalid_request", "dimensions"),
        ({"model": "embed-v4.0"}, 404, "model_not_found", "embed-v4.0"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_what_cannot_be_done_is_said_in_coheres_shape(full, body, status, code, said) -> None:
    answer = full.post("/v2/embed", json={"texts": ["a"]} | body)
    assert said in assert_error(answer, status, code)


def test_texts_by_another_name_are_told_the_right_one(client) -> None:
    message = assert_error(client.post("/v2/embed", json={"input": ["a"]}), 400, "invalid_request")
    assert "texts is missing, and input is none: call it texts" in message

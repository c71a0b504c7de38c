"""Cohere's embed and rerank API, and the rerank API of Jina, Voyage and vLLM."""

import base64

import numpy as np
import pytest

from tests.app.conftest import answered
from tests.app.dialects.conftest import dense, native
from tests.support.checkpoints import corpus
from tests.support.texts import varied_texts

QUERY = "hybrid search"
DOCUMENTS = [*corpus(12, seed=5), "", "hybrid search vector", "same", "same"]


def rank(client, path: str = "/v2/rerank", **body) -> dict:
    return answered(client, path, **{"query": QUERY, "documents": DOCUMENTS} | body)


def native_ranking(client, **body) -> list[tuple[int, float]]:
    body = {"query": QUERY, "passages": DOCUMENTS, "normalize": True} | body
    results = client.post("/rerank", json=body).json()["results"]
    return [(item["index"], item["score"]) for item in results]


def scored(answer: dict) -> list[tuple[int, float]]:
    return [(item["index"], item["relevance_score"]) for item in answer["results"]]


def assert_error(answer, status: int, code: str) -> str:
    error = answer.json()
    assert (answer.status_code, error["code"]) == (status, code)
    assert error["message"] == error["detail"]
    assert error["id"] == answer.headers["x-request-id"]
    return error["message"]


def test_rerank_paths_read_both_bodies_and_score_by_probability(full) -> None:
    native_body = {"query": QUERY, "passages": DOCUMENTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking"):
        assert scored(rank(full, path)) == native_ranking(full)
        refused = full.post(path, json=native_body | {"top_n": 3})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
        assert "message" not in refused.json()


def test_a_rerank_response_has_the_fields_of_cohere_and_jina(full) -> None:
    answer = rank(full, model="rerank-v3.5")
    assert list(answer) == ["id", "model", "results", "object", "data", "meta", "usage"]
    assert answer["model"] == "tiny-reranker"
    assert list(answer["results"][0]) == ["index", "relevance_score"]
    native_usage = answered(full, "/rerank", query=QUERY, passages=DOCUMENTS)["usage"]
    assert answer["usage"] == native_usage
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    assert answer["meta"]["tokens"] == {"input_tokens": native_usage["total_tokens"]}
    assert answer["meta"]["api_version"]["version"]
    for item in rank(full, return_documents="True")["results"]:
        assert item["document"] == {"text": DOCUMENTS[item["index"]]}


@pytest.mark.parametrize(
    ("body", "count"),
    [({"top_k": 3}, 3), ({"top_k": "0"}, 16), ({"top_n": 3}, 3), ({"top_n": 99}, 16), ({}, 16)],
)
def test_top_n_limits_the_results_and_data_repeats_them(full, body, count) -> None:
    answer = rank(full, **body)
    assert scored(answer) == native_ranking(full)[:count]
    assert (answer["object"], answer["data"]) == ("list", answer["results"])
    answer = rank(full, return_documents=True, **body)
    for item, voyage_item in zip(answer["results"], answer["data"], strict=True):
        assert voyage_item == item | {"document": item["document"]["text"]}


@pytest.mark.parametrize(
    ("body", "native_body"),
    [
        ({"documents": [{"text": text, "title": "no"} for text in DOCUMENTS]}, {}),
        ({"query": {"text": QUERY}, "rank_fields": ["text"]}, {}),
        ({"activation": False}, {"normalize": False}),
        ({"raw_scores": True}, {"normalize": False}),
        ({"raw_scores": "true", "use_activation": False}, {"normalize": False}),
        # They say what holds anyway.
        ({"raw_scores": False, "max_chunks_per_doc": 10, "truncate_prompt_tokens": 300}, {}),
        # Fields that clients add.
        ({"return_len": True, "priority": 3, "user": "me", "return_documents": None}, {}),
    ],
)
def test_aliases_and_objects_are_read(full, body, native_body) -> None:
    assert scored(rank(full, **body)) == native_ranking(full, **native_body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": None}, "query"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a", {"title": "a"}]}, "documents[1]"),
        ({"top_n": -1}, "top_n"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"max_chunks_per_doc": 0}, "max_chunks_per_doc"),
        # vLLM's.
        ({"truncate_prompt_tokens": 299}, "truncate_prompt_tokens is below the 300 tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is below the 300 tokens"),
        ({"max_tokens_per_query": 5}, "max_tokens_per_query"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"padding": "max_length"}, "padding"),
        ({"chat_template": "a"}, "chat_template"),
        ({"chat_template_kwargs": {"instruction": "a"}}, "chat_template_kwargs"),
        # Jina's and Mixedbread's.
        ({"max_query_length": 5}, "max_query_length"),
        ({"return_embeddings": True}, "return_embeddings"),
        ({"rewrite_query": "true"}, "rewrite_query"),
        # Two names of one option.
        ({"top_n": 1, "top_k": 2}, "top_n and top_k mean the same and differ"),
        ({"truncate": "END", "truncation": False}, "truncate and truncation"),
        ({"truncate": False, "truncation_side": "left"}, "truncation_side"),
        ({"use_activation": True, "activation": False}, "use_activation and activation"),
        ({"raw_scores": True, "use_activation": True}, "raw_scores and use_activation"),
        ({"instruct": "Find it"}, "instruction"),
        ({"instruct": "Find it", "instruction": "Find"}, "instruction and instruct mean the same"),
        ({"documents": ["a"] * 41}, "MAX_RERANK_PASSAGES"),
    ],
)
def test_an_invalid_rerank_request_is_400_and_names_the_field(full, body, message) -> None:
    answer = full.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS} | body)
    assert message in assert_error(answer, 400, "invalid_request")


def test_a_document_that_max_chunks_per_doc_would_split_is_refused(full) -> None:
    long = {"query": QUERY, "documents": ["search " * 400, "bread"]}
    refused = full.post("/v1/rerank", json=long | {"max_chunks_per_doc": 2})
    assert "400 tokens" in assert_error(refused, 400, "text_too_long")
    for options in ({"max_chunks_per_doc": 1}, {"max_chunks_per_doc": 2, "truncate": True}):
        assert rank(full, **long, **options)["results"] == rank(full, **long)["results"]


def test_truncation_cuts_documents_to_max_tokens(full) -> None:
    short = rank(full, documents=["search " * 4, "bread " * 4])
    for field in ("max_tokens_per_doc", "max_doc_length"):
        cut = rank(full, documents=["search " * 9, "bread " * 9], **{field: 4})
        assert np.array(scored(cut)) == pytest.approx(np.array(scored(short)), abs=1e-6)
        assert cut["usage"] == short["usage"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"documents": []}, 400, "empty_input"),
        ({"model": "tiny-m3"}, 404, "model_not_found"),
        ({"documents": ["search " * 400], "truncate": "NONE"}, 400, "text_too_long"),
    ],
    ids=["empty", "model", "long"],
)
def test_rerank_errors_have_a_code(full, body, status, code) -> None:
    answer = full.post("/v2/rerank", json={"query": QUERY, "documents": DOCUMENTS} | body)
    message = assert_error(answer, status, code)
    assert ("rerank-v3.5" in message) == (status == 404)


TEXTS = varied_texts(9)
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def embed(client, path: str = "/v2/embed", **body) -> dict:
    return answered(client, path, **{"texts": TEXTS} | body)


def test_vectors_are_the_native_ones_and_a_list_in_version_1(client) -> None:
    answer = embed(client, input_type="search_document", embedding_types=["float"])
    assert list(answer) == ["id", "embeddings", "texts", "meta", "response_type"]
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["embeddings"] == {"float": dense(client, TEXTS)}
    assert answer["texts"] == TEXTS
    counted = answered(client, "/embeddings/", sentences=TEXTS)["usage"]
    assert answer["meta"]["billed_units"] == {"input_tokens": counted["total_tokens"]}
    assert embed(client)["embeddings"] == answer["embeddings"]
    plain = embed(client, "/v1/embed")
    assert plain["embeddings"] == answer["embeddings"]["float"]
    assert plain["response_type"] == "embeddings_floats"
    typed = embed(client, "/v1/embed", embedding_types=["float"])
    assert typed["response_type"] == "embeddings_by_type"
    assert typed["embeddings"] == answer["embeddings"]


def test_all_embedding_types_have_the_same_vectors(client) -> None:
    by_type = embed(client, embedding_types=TYPES)["embeddings"]
    assert list(by_type) == TYPES
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in by_type.pop("base64")]
    np.testing.assert_array_equal(decoded, np.array(by_type.pop("float"), np.float32))
    for dtype, vectors in by_type.items():
        assert vectors == [item["dense"] for item in native(client, TEXTS, output_dtype=dtype)]


def test_queries_get_the_models_prompt_if_it_has_one(full, client) -> None:
    as_queries = dense(full, TEXTS, input_type="query")
    assert embed(full, input_type="search_query")["embeddings"] == {"float": as_queries}
    assert as_queries != dense(full, TEXTS)
    for other in ("search_document", "classification", "clustering", None):
        assert embed(full, input_type=other)["embeddings"] == {"float": dense(full, TEXTS)}
    assert embed(client, input_type="search_query")["embeddings"] == embed(client)["embeddings"]
    fewer = embed(full, output_dimension=32)["embeddings"]["float"]
    assert fewer == dense(full, TEXTS, dimensions=32)


def test_inputs_with_one_text_each_are_texts(client) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    answer = answered(client, "/v2/embed", inputs=inputs)
    assert (answer["texts"], answer["embeddings"]) == (TEXTS, {"float": dense(client, TEXTS)})
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    for parts in ([*inputs[0]["content"], image], [*inputs[0]["content"]] * 2, [], 1):
        refused = client.post("/v2/embed", json={"inputs": [*inputs, {"content": parts}]})
        assert "inputs must have content" in assert_error(refused, 400, "invalid_request")
    refused = client.post("/v2/embed", json={"images": inputs})
    assert "images must be a data URL" in assert_error(refused, 400, "invalid_request")


def test_truncation_cuts_a_long_text_at_the_requested_side(full) -> None:
    body = {"texts": ["bread " + "search " * 400 + "kitchen"], "model": "tiny-m3"}
    refused = full.post("/v2/embed", json=body | {"truncate": "NONE"})
    message = assert_error(refused, 400, "text_too_long")
    assert message.endswith("shorten it, or let the option truncate cut it.")
    start, end = (embed(full, **body, truncate=side)["embeddings"] for side in ("START", "end"))
    assert start != end
    assert embed(full, **body)["embeddings"] == end
    short = body | {"texts": ["bread search search search search"]}
    assert embed(full, **body, max_tokens=5)["embeddings"] == embed(full, **short)["embeddings"]


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
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
def test_an_invalid_embed_request_gets_coheres_error(full, body, status, code, message) -> None:
    answer = full.post("/v2/embed", json={"texts": ["a"]} | body)
    assert message in assert_error(answer, status, code)
    error = assert_error(full.post("/v2/embed", json={"input": ["a"]}), 400, "invalid_request")
    assert "texts is missing: rename input to texts" in error

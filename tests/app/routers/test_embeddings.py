"""POST /embeddings/ and its options; the oracle checks the numbers."""

import json
import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer

from tests.app.conftest import answered, serving
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


def test_truncation_of_a_long_text_is_a_warning(client) -> None:
    answer = embed(client, "short", "search " * 9000, return_colbert=False)
    (warning,) = answer["warnings"]
    assert (warning["code"], warning["severity"]) == ("input_truncated", "warning")
    assert warning["target"] == {"field": "sentences", "index": 1, "pointer": "/sentences/1"}
    assert warning["details"] == {
        "model": answer["model_name"],
        "max_tokens": 2048,
        "original_tokens": 9002,
        "truncated_tokens": 6954,
        "truncation_side": "end",
    }
    assert "9002 tokens" in warning["message"]


def test_a_large_response_has_no_content_length_and_all_vectors(client) -> None:
    texts = [f"search {i} " + "vector " * 300 for i in range(24)]
    uncompressed = {"Accept-Encoding": "identity"}
    response = client.post("/embeddings/", json={"sentences": texts}, headers=uncompressed)
    assert "content-length" not in response.headers
    assert len(response.content) > 4 << 20
    answer = orjson.loads(response.content)
    assert [item["id"] for item in answer["data"]] == list(range(24))
    counts = [len(item["embeddings"]["colbert"]) for item in answer["data"]]
    assert sum(counts) == answer["usage"]["prompt_tokens"] - 24


# Options.

PROMPTS = {"query": "Instruct: search\nQuery:", "document": "", "code": "code "}


@pytest.fixture(scope="module")
def qwen(tiny_m3: Path, tiny_qwen: Path, tiny_reranker: Path, tmp_path_factory):
    """A client of a service with Qwen with prompts, a cross-encoder and short limits."""
    folder = tmp_path_factory.mktemp("options")
    dense = shutil.copytree(tiny_qwen, folder / "tiny-qwen")
    configuration = json.dumps({"prompts": PROMPTS, "default_prompt_name": None})
    (dense / "config_sentence_transformers.json").write_text(configuration)
    with serving(
        embedding_model=str(tiny_m3),
        dense_embedding_model=str(dense),
        reranker_model=str(tiny_reranker),
        qwen_embed_max_length=60,
        bge_embed_max_length=40,
        bge_rerank_max_length=40,
    ) as client:
        yield client


def dense_of(answer: dict) -> list[np.ndarray]:
    return [np.float32(item["embeddings"]["dense"]) for item in answer["data"]]


def assert_close(actual, expected) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "prompt"),
    [
        ({"input_type": "query"}, PROMPTS["query"]),
        ({"input_type": "document"}, ""),
        ({"prompt_name": "code"}, PROMPTS["code"]),
        ({"prompt": "to find: "}, "to find: "),
    ],
)
def test_a_prompt_is_put_before_each_text_for_dense_vectors(qwen, option, prompt) -> None:
    texts = ["hybrid search", "music", ""]
    prompted = embed(qwen, *texts, **option)
    written = embed(qwen, *(prompt + text for text in texts))
    assert_close(dense_of(prompted), dense_of(written))
    for item, plain in zip(prompted["data"], embed(qwen, *texts)["data"], strict=True):
        for kind in ("sparse", "colbert"):
            assert item["embeddings"][kind] == plain["embeddings"][kind]


def test_dimensions_are_the_first_ones_normalised_and_the_whole_vector_is_raw(qwen) -> None:
    (raw,) = dense_of(embed(qwen, "hybrid search"))
    assert np.linalg.norm(raw) > 2
    (unit,) = dense_of(embed(qwen, "hybrid search", normalize_dense=True))
    (cut,) = dense_of(embed(qwen, "hybrid search", dimensions=32, return_colbert=False))
    assert_close([unit, cut], [raw / np.linalg.norm(raw), raw[:32] / np.linalg.norm(raw[:32])])


def test_truncation_from_the_left_keeps_the_end_of_the_text_and_the_prompt(qwen) -> None:
    words = ["search", "vector", "history"] * 40
    answer = embed(qwen, " ".join(words), truncation_side="left")
    by_model = {warning["details"]["max_tokens"]: warning for warning in answer["warnings"]}
    assert set(by_model) == {40, 60}
    details = by_model[40]["details"]
    assert (details["truncation_side"], details["original_tokens"]) == ("start", 122)
    assert details["truncated_tokens"] == 122 - 40
    assert by_model[40]["message"].endswith("tiny-m3 read the last 40.")
    tail = embed(qwen, " ".join(words[-38:]))
    assert_close(
        *(np.float32(side["data"][0]["embeddings"]["colbert"])[None] for side in (answer, tail))
    )
    prompted = embed(qwen, " ".join(words), truncation_side="left", input_type="query")
    assert not np.allclose(dense_of(prompted)[0], dense_of(answer)[0], atol=1e-3)


def test_return_tokens_adds_the_tokens_of_weights_and_rows(client, tiny_m3) -> None:
    vocabulary = Tokenizer.from_file(str(tiny_m3 / "tokenizer.json"))
    text = "hybrid search search of things"
    (item,) = embed(client, text, return_tokens=True)["data"]
    assert item["tokens"]["sparse"] == {
        key: vocabulary.id_to_token(int(key)) for key in item["embeddings"]["sparse"]
    }
    assert item["tokens"]["colbert"] == vocabulary.encode(text).tokens[1:]
    assert len(item["tokens"]["colbert"]) == len(item["embeddings"]["colbert"])
    options = {"return_tokens": True, "sparse_as_indices": True, "return_colbert": False}
    (listed,) = embed(client, text, **options)["data"]
    assert listed["tokens"] == {"sparse": [*item["tokens"]["sparse"].values()], "colbert": None}
    assert "tokens" not in embed(client, text)["data"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # The engine's errors: tests/smart_embedder/pipelines/test_embedding.py.
        ({"dimensions": 65}, "dimensions is 65, and a vector of tiny-m3 has 64: leave"),
        ({"input_type": "classification"}, "14 characters: send 'query' or 'document'"),
        ({"colbert_pool_factor": 1}, "colbert_pool_factor is out of range: send at leas"),
        ({"truncation_side": "middle"}, "send 'left' or 'right'"),
        ({"dimensions": 32.5}, "The field dimensions is a number: send a whole number"),
        ({"truncate": False, "truncation_side": "left"}, "no effect without truncate"),
        ({"task": "search"}, "There is no field task here: did you mean prompt?"),
        ({"output_dtype": "float16"}, "JSON numbers cannot hold"),
        ({"output_dtype": "bfloat16"}, f"or ask for {SAFETENSORS} in Accept"),
        ({"colbert_pool_factor": 2, "input_type": "query"}, "these are queries"),
        ({"colbert_pool_factor": 2, "return_tokens": True}, "exclude each other"),
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


@pytest.mark.parametrize(
    ("accept", "options"),
    [
        (JSON, {"output_dtype": "int8"}),
        (JSON, {"output_dtype": "float16", "encoding": "base64"}),
        (SAFETENSORS, {"output_dtype": "float16"}),
        (JSON, {"colbert_pool_factor": 2}),
        (JSON, NO_KIND | {"muvera": "query"}),
        (JSON, {"truncate": False, "truncation_side": "right"}),
    ],
    ids=str,
)
def test_compatible_options_are_accepted(client, accept, options) -> None:
    body = {"sentences": ["a"]} | options
    response = client.post("/embeddings/", json=body, headers={"Accept": accept})
    assert (response.status_code, response.headers["content-type"]) == (200, accept)


def test_without_truncation_a_long_text_or_passage_is_422_and_named(client, qwen) -> None:
    body = {"sentences": ["short", "search " * 45], "truncate": False}
    response = qwen.post("/embeddings/", json=body | {"return_dense": False})
    assert (response.status_code, response.json()["code"]) == (422, "text_too_long")
    assert response.json()["detail"] == (
        "The text at index 1 has 47 tokens, and tiny-m3 reads at most 40 of it: shorten it, or let "
        "the option truncate cut it."
    )
    assert response.json()["errors"][0]["pointer"] == "/sentences/1"
    assert answered(client, "/embeddings/", **body)["warnings"] == []
    body = {"query": "hybrid", "passages": ["search " * 45, "music"], "truncate": False}
    response = qwen.post("/rerank", json=body)
    assert (response.status_code, response.json()["code"]) == (422, "text_too_long")
    assert response.json()["errors"][0]["pointer"] == "/passages/0"
    assert answered(client, "/rerank", **body)["warnings"] == []


def test_truncation_cuts_passages_at_the_requested_side(qwen) -> None:
    words = ["search", "vector", "history", "music"] * 20
    body = {"query": "hybrid", "passages": [" ".join(words), "music"]}
    answer = answered(qwen, "/rerank", **body, truncation_side="left")
    (warning,) = answer["warnings"]
    assert warning["code"] == "passage_truncated"
    assert warning["details"]["truncation_side"] == "start"
    kept = warning["details"]["max_tokens"]
    expected = answered(qwen, "/rerank", **body | {"passages": [" ".join(words[-kept:]), "music"]})
    assert expected["warnings"] == []
    for field in ("index", "score"):
        assert_close(*([item[field] for item in side["results"]] for side in (answer, expected)))


def test_truncation_of_a_text_of_five_megabytes_has_a_lower_bound(client) -> None:
    answer = embed(client, "search vector " * 400_000, return_colbert=False, return_sparse=False)
    (warning,) = answer["warnings"]
    details = warning["details"]
    assert details["lower_bound"] is True
    assert 2048 < details["original_tokens"] <= 800_002
    assert details["truncated_tokens"] == details["original_tokens"] - details["max_tokens"]
    assert f"at least {details['original_tokens']} tokens" in warning["message"]

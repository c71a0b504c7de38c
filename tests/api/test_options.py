"""Options of the native endpoints through real server processes, and their errors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.api.conftest import answered
from tests.support.server import run_server

PROMPTS = {"query": "Instruct: search\nQuery:", "document": "", "code": "code "}


@pytest.fixture(scope="module")
def qwen(tiny_m3: Path, tiny_qwen: Path, tiny_reranker: Path, tmp_path_factory):
    """Qwen with prompts for dense vectors, and a cross-encoder; short limits."""
    folder = tmp_path_factory.mktemp("options")
    dense = shutil.copytree(tiny_qwen, folder / "tiny-qwen")
    configuration = json.dumps({"prompts": PROMPTS, "default_prompt_name": None})
    (dense / "config_sentence_transformers.json").write_text(configuration)
    settings = {
        "EMBEDDING_MODEL": str(tiny_m3),
        "DENSE_EMBEDDING_MODEL": str(dense),
        "RERANKER_MODEL": str(tiny_reranker),
        "QWEN_EMBED_MAX_LENGTH": "60",
        "BGE_EMBED_MAX_LENGTH": "40",
        "BGE_RERANK_MAX_LENGTH": "40",
    }
    with run_server(folder, **settings) as running, running.client() as client:
        running.wait_until_healthy()
        yield client


def embed(client, *sentences: str, **options) -> dict:
    return answered(client, "/embeddings/", sentences=sentences, **options)


def dense_of(answer: dict) -> list[np.ndarray]:
    return [np.float32(item["embeddings"]["dense"]) for item in answer["data"]]


def others_of(answer: dict) -> list[tuple]:
    kinds = ("sparse", "colbert")
    return [tuple(item["embeddings"][kind] for kind in kinds) for item in answer["data"]]


def assert_close(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
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
def test_a_prompt_is_what_the_client_could_have_written_itself(qwen, option, prompt) -> None:
    texts = ["hybrid search", "music", ""]
    asked = embed(qwen, *texts, **option)
    written = embed(qwen, *(prompt + text for text in texts))
    assert_close(dense_of(asked), dense_of(written))
    assert others_of(asked) == others_of(embed(qwen, *texts))


def test_dimensions_are_the_first_ones_at_unit_length(qwen) -> None:
    raw = dense_of(embed(qwen, "hybrid search"))[0]
    cut = dense_of(embed(qwen, "hybrid search", dimensions=32, return_colbert=False))[0]
    assert_close([cut], [raw[:32] / np.linalg.norm(raw[:32])])


def test_a_text_cut_from_the_left_is_its_end(qwen, tiny_m3) -> None:
    words = ["search", "vector", "history"] * 40
    answer = embed(qwen, " ".join(words), truncation_side="left")
    by_model = {warning["details"]["max_tokens"]: warning for warning in answer["warnings"]}
    assert set(by_model) == {40, 60}
    details = by_model[40]["details"]
    assert (details["truncation_side"], details["original_tokens"]) == ("start", 122)
    assert details["truncated_tokens"] == 122 - 40
    assert by_model[40]["message"].endswith("tiny-m3 read the last 40.")
    tail = " ".join(words[-38:])
    assert_close(
        [np.float32(answer["data"][0]["embeddings"]["colbert"])],
        [np.float32(embed(qwen, tail)["data"][0]["embeddings"]["colbert"])],
    )


def test_a_prompt_stays_where_the_text_is_cut_from_the_left(qwen) -> None:
    text = "search vector history " * 40
    cut = embed(qwen, text, truncation_side="left", input_type="query")
    plain = embed(qwen, text, truncation_side="left")
    assert not np.allclose(dense_of(cut)[0], dense_of(plain)[0], atol=1e-3)
    assert {warning["details"]["max_tokens"] for warning in cut["warnings"]} == {40, 60}


def test_tokens_stand_beside_weights_and_rows(client, tiny_m3) -> None:
    vocabulary = Tokenizer.from_file(str(tiny_m3 / "tokenizer.json"))
    text = "hybrid search search of things"
    (item,) = embed(client, text, return_tokens=True)["data"]
    sparse, colbert = item["embeddings"]["sparse"], item["embeddings"]["colbert"]
    assert list(item["tokens"]["sparse"]) == list(sparse)
    for token_id, string in item["tokens"]["sparse"].items():
        assert vocabulary.id_to_token(int(token_id)) == string
    assert item["tokens"]["colbert"] == vocabulary.encode(text).tokens[1:]
    assert len(item["tokens"]["colbert"]) == len(colbert)
    (listed,) = embed(client, text, return_tokens=True, sparse_as_indices=True)["data"]
    assert listed["tokens"]["sparse"] == list(item["tokens"]["sparse"].values())
    (alone,) = embed(client, text, return_tokens=True, return_colbert=False)["data"]
    assert alone["tokens"]["colbert"] is None
    assert "tokens" not in embed(client, text)["data"][0]


def test_a_large_answer_with_tokens_is_rendered_whole(client) -> None:
    texts = ["search vector " * 400] * 3
    answer = embed(client, *texts, return_tokens=True)
    for item in answer["data"]:
        assert len(item["tokens"]["colbert"]) == len(item["embeddings"]["colbert"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 32}, "was not trained for fewer than its 64 dimensions"),
        ({"dimensions": 65}, "dimensions is 65, and a vector of tiny-m3 has 64: leave it out"),
        ({"input_type": "classification"}, "14 characters: send 'query' or 'document'"),
        ({"colbert_pool_factor": 1}, "colbert_pool_factor is out of range: send at least 2"),
        ({"prompt_name": "query"}, "it has no prompts"),
        ({"prompt": ""}, "The option prompt has 0 characters"),
        ({"input_type": "search"}, "field input_type is a string of 6 characters: send 'query'"),
        ({"truncation_side": "middle"}, "send 'left' or 'right'"),
        ({"dimensions": 32.5}, "The field dimensions is a number: send a whole number"),
        ({"truncate": False, "truncation_side": "left"}, "no effect without truncate"),
        ({"task": "search"}, "There is no field task here: did you mean prompt?"),
    ],
)
def test_an_option_without_effect_is_422_and_says_so(client, options, message) -> None:
    response = client.post("/embeddings/", json={"sentences": ["a"]} | options)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
    assert message in response.json()["detail"]
    assert embed(client, "a", return_colbert=False)["data"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_name": "none"}, "it has query, document, code"),
        ({"dimensions": 31}, "tiny-qwen gives 32 to 64"),
        ({"dimensions": 65}, "dimensions is 65, and a vector of tiny-qwen has 64: leave it out"),
        ({"prompt": "a", "return_dense": False}, "has no effect without dense vectors"),
    ],
)
def test_an_option_that_qwen_cannot_follow_says_what_it_can(qwen, options, message) -> None:
    response = qwen.post("/embeddings/", json={"sentences": ["a"]} | options)
    assert response.status_code == 422
    assert message in response.json()["detail"]


@pytest.mark.parametrize("input_type", ["query", "document"])
def test_every_model_takes_the_type_of_texts(client, qwen, input_type) -> None:
    def made(client, **options) -> list[dict]:
        answer = embed(client, "a", return_colbert=False, **options)
        return [item["embeddings"] for item in answer["data"]]

    assert made(client, input_type=input_type) == made(client)
    sparse = {"return_dense": False}
    assert made(qwen, input_type=input_type, **sparse) == made(qwen, **sparse)


def test_a_text_that_may_not_be_cut_is_named(client, qwen) -> None:
    body = {"sentences": ["short", "search " * 45], "truncate": False}
    response = qwen.post("/embeddings/", json=body | {"return_dense": False})
    assert (response.status_code, response.json()["code"]) == (422, "text_too_long")
    assert response.json()["detail"] == (
        "The text at index 1 has 47 tokens, and tiny-m3 reads at most 40 of it: shorten it, or let "
        "the option truncate cut it."
    )
    assert response.json()["errors"][0]["pointer"] == "/sentences/1"
    assert embed(client, *body["sentences"], truncate=False)["warnings"] == []


def test_passages_are_cut_from_the_side_that_is_asked_for(qwen) -> None:
    words = ["search", "vector", "history", "music"] * 20
    body = {"query": "hybrid", "passages": [" ".join(words), "music"]}
    answer = qwen.post("/rerank", json=body | {"truncation_side": "left"}).json()
    (warning,) = answer["warnings"]
    assert warning["code"] == "passage_truncated"
    assert warning["details"]["truncation_side"] == "start"
    kept = warning["details"]["max_tokens"]
    tail = {"query": "hybrid", "passages": [" ".join(words[-kept:]), "music"]}
    expected = qwen.post("/rerank", json=tail).json()
    assert expected["warnings"] == []
    assert [each["index"] for each in answer["results"]] == [
        each["index"] for each in expected["results"]
    ]
    assert_close(
        [each["score"] for each in answer["results"]],
        [each["score"] for each in expected["results"]],
    )
    refused = qwen.post("/rerank", json=body | {"truncate": False})
    assert (refused.status_code, refused.json()["code"]) == (422, "text_too_long")
    assert refused.json()["errors"][0]["pointer"] == "/passages/0"
    assert qwen.post("/rerank", json=tail | {"truncate": False}).status_code == 200


def test_a_text_of_five_megabytes_is_reported_with_a_lower_bound(client) -> None:
    answer = embed(client, "search vector " * 400_000, return_colbert=False, return_sparse=False)
    (warning,) = answer["warnings"]
    details = warning["details"]
    assert details["lower_bound"] is True
    assert 8192 + 65_536 <= details["original_tokens"] <= 800_002
    assert details["truncated_tokens"] == details["original_tokens"] - details["max_tokens"]
    assert f"at least {details['original_tokens']} tokens" in warning["message"]

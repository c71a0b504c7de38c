"""Options of the native endpoints, and their errors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.api.conftest import answered, serving

PROMPTS = {"query": "Instruct: search\nQuery:", "document": "", "code": "code "}


@pytest.fixture(scope="module")
def qwen(tiny_m3: Path, tiny_qwen: Path, tiny_reranker: Path, tmp_path_factory):
    """Qwen with prompts for dense vectors, and a cross-encoder; short limits."""
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


def test_dimensions_are_the_first_ones_at_unit_length_and_the_whole_vector_is_raw(qwen) -> None:
    (raw,) = dense_of(embed(qwen, "hybrid search"))
    assert np.linalg.norm(raw) > 2
    (unit,) = dense_of(embed(qwen, "hybrid search", normalize_dense=True))
    (cut,) = dense_of(embed(qwen, "hybrid search", dimensions=32, return_colbert=False))
    assert_close([unit, cut], [raw / np.linalg.norm(raw), raw[:32] / np.linalg.norm(raw[:32])])


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


@pytest.mark.parametrize(
    ("served", "options", "message"),
    [
        ("client", {"dimensions": 32}, "was not trained for fewer than its 64 dimensions"),
        ("client", {"dimensions": 65}, "dimensions is 65, and a vector of tiny-m3 has 64: leave"),
        ("client", {"input_type": "classification"}, "14 characters: send 'query' or 'document'"),
        ("client", {"colbert_pool_factor": 1}, "colbert_pool_factor is out of range: send at leas"),
        ("client", {"prompt_name": "query"}, "it has no prompts"),
        ("client", {"prompt": ""}, "The option prompt has 0 characters"),
        ("client", {"truncation_side": "middle"}, "send 'left' or 'right'"),
        ("client", {"dimensions": 32.5}, "The field dimensions is a number: send a whole number"),
        ("client", {"truncate": False, "truncation_side": "left"}, "no effect without truncate"),
        ("client", {"task": "search"}, "There is no field task here: did you mean prompt?"),
        ("qwen", {"prompt_name": "none"}, "it has query, document, code"),
        ("qwen", {"dimensions": 31}, "tiny-qwen gives 32 to 64"),
        ("qwen", {"dimensions": 65}, "dimensions is 65, and a vector of tiny-qwen has 64: leave"),
        ("qwen", {"prompt": "a", "return_dense": False}, "has no effect without dense vectors"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_followed_is_422_and_says_so(
    request, served: str, options, message: str
) -> None:
    client = request.getfixturevalue(served)
    response = client.post("/embeddings/", json={"sentences": ["a"]} | options)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
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
    answer = answered(qwen, "/rerank", **body, truncation_side="left")
    (warning,) = answer["warnings"]
    assert warning["code"] == "passage_truncated"
    assert warning["details"]["truncation_side"] == "start"
    kept = warning["details"]["max_tokens"]
    tail = {"query": "hybrid", "passages": [" ".join(words[-kept:]), "music"]}
    expected = answered(qwen, "/rerank", **tail)
    assert expected["warnings"] == []
    for field in ("index", "score"):
        ours, theirs = ([each[field] for each in side["results"]] for side in (answer, expected))
        assert_close(ours, theirs)
    refused = qwen.post("/rerank", json=body | {"truncate": False})
    assert (refused.status_code, refused.json()["code"]) == (422, "text_too_long")
    assert refused.json()["errors"][0]["pointer"] == "/passages/0"
    assert qwen.post("/rerank", json=tail | {"truncate": False}).status_code == 200


def test_a_text_of_five_megabytes_is_reported_with_a_lower_bound(client) -> None:
    answer = embed(client, "search vector " * 400_000, return_colbert=False, return_sparse=False)
    (warning,) = answer["warnings"]
    details = warning["details"]
    assert details["lower_bound"] is True
    assert 2048 + 65_536 <= details["original_tokens"] <= 800_002
    assert details["truncated_tokens"] == details["original_tokens"] - details["max_tokens"]
    assert f"at least {details['original_tokens']} tokens" in warning["message"]

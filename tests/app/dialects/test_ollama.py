"""Ollama's API: the vectors of the native endpoint in Ollama's form."""

import re
from datetime import datetime

import pytest

from tests.app.conftest import answered as post
from tests.app.dialects.conftest import dense
from tests.support.texts import varied_texts

TEXTS = varied_texts(9)
LONG = "bread " + "search " * 400


def embed(client, **body) -> list[list[float]]:
    vectors: list[list[float]] = post(client, "/api/embed", **body)["embeddings"]
    return vectors


def assert_error(answer, status: int) -> str:
    error = answer.json()
    assert (answer.status_code, list(error)) == (status, ["error"]), error
    message: str = error["error"]
    return message


@pytest.mark.parametrize("model", ["TINY-m3:latest", None])
def test_embed_returns_the_native_vectors_to_the_last_bit(client, model) -> None:
    answer = post(client, "/api/embed", model=model, input=TEXTS, keep_alive="5m")
    assert answer.pop("embeddings") == dense(client, TEXTS)
    assert answer.pop("model") == (model or "tiny-m3")
    usage = post(client, "/embeddings/", sentences=TEXTS)["usage"]
    assert answer.pop("prompt_eval_count") == usage["total_tokens"]
    assert list(answer) == ["total_duration", "load_duration"]
    assert answer["total_duration"] > 1_000 > answer["load_duration"] == 0
    assert embed(client, input=TEXTS[0]) == dense(client, TEXTS[:1])


def test_embeddings_returns_the_vector_of_a_prompt_as_the_model_makes_it(client, full) -> None:
    answer = post(client, "/api/embeddings", model="tiny-m3", prompt="search")
    assert answer == {"embedding": dense(client, ["search"])[0]}
    answer = post(full, "/api/embeddings", model="tiny-qwen:latest", prompt="search", options={})
    assert answer == {"embedding": dense(full, ["search"], normalize_dense=False)[0]}
    assert [answer["embedding"]] != dense(full, ["search"])
    assert embed(full, input="search", dimensions=0) == dense(full, ["search"])
    assert embed(full, input=TEXTS, dimensions=32) == dense(full, TEXTS, dimensions=32)


def test_a_long_text_is_cut_at_the_limit_or_num_ctx_and_400_without_truncation(full) -> None:
    cut = embed(full, model="tiny-m3", input=LONG)
    for options in ({"num_ctx": None, "seed": 7}, {"num_ctx": "8192"}, {"num_ctx": 300}):
        assert embed(full, model="tiny-m3", input=LONG, options=options) == cut
    # Two of the tokens are special.
    shorter = embed(full, model="tiny-m3", input="bread search search")
    assert embed(full, model="tiny-m3", input=LONG, options={"num_ctx": 5}) == shorter != cut
    prompt = {"model": "tiny-m3", "prompt": LONG}
    answer = post(full, "/api/embeddings", **prompt, options={"num_ctx": 5})
    assert [answer["embedding"]] == shorter
    refused = full.post("/api/embed", json={"model": "tiny-m3", "input": LONG, "truncate": False})
    assert "403 tokens" in assert_error(refused, 400)


def test_2048_texts_are_the_limit_as_in_openais_api(full) -> None:
    refused = full.post("/api/embed", json={"input": ["search"] * 2049})
    assert "MAX_SENTENCES_PER_REQUEST" in assert_error(refused, 400)
    assert len(embed(full, input=["a"] * 41)) == 41


def test_tags_list_the_names_of_embedding_models_which_embed(full) -> None:
    models = full.get("/api/tags").json()["models"]
    names = [model["name"] for model in models]
    assert "tiny-m3:latest" in names
    assert "text-embedding-3-small:latest" in names
    assert not any("reranker" in name for name in names)
    for model in models:
        assert model["model"] == model["name"]
        assert re.fullmatch("[0-9a-f]{64}", model["digest"])
        assert datetime.fromisoformat(model["modified_at"]).tzinfo is not None
        assert model["details"]["quantization_level"] == "float32"
        assert embed(full, model=model["name"], input="search")
    digests = {model["digest"] for model in models}
    assert len(digests) == 2  # One for each model.
    assert re.fullmatch(r"\d+\.\d+\.\d+", full.get("/api/version").json()["version"])
    assert full.head("/api/tags").status_code == 200


def test_show_has_the_limits_of_a_model(full) -> None:
    about = post(full, "/api/show", name="tiny-m3:latest")
    assert about == post(full, "/api/show", model="tiny-m3")
    assert about["capabilities"] == ["embedding"]
    family = about["model_info"]["general.architecture"]
    assert about["model_info"][f"{family}.context_length"] == 300
    assert about["model_info"][f"{family}.embedding_length"] == 64


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/api/embed", {"input": []}, 400, "input is empty"),
        ("/api/embed", {"model": "tiny-m3"}, 400, "input is missing"),
        ("/api/embed", {"input": [1, 2]}, 400, "token ids"),
        ("/api/embed", {"input": "a", "options": {"num_ctx": 0}}, 400, "options.num_ctx"),
        ("/api/embed", {"input": "a", "model": "nobody"}, 404, "nobody is not served here"),
        ("/api/embed", {"input": "a", "model": "tiny-m3", "dimensions": 32}, 400, "dimensions"),
        ("/api/embeddings", {"input": "a"}, 400, "rename input to prompt"),
        ("/api/show", {}, 400, "model is missing"),
        ("/api/show", {"model": "a", "options": [1] * 70}, 400, "more than 64 values"),
        ("/api/show", [1], 400, "model is missing"),
        ("/api/chat", {"model": "tiny-m3"}, 404, "there is no /api/chat"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_errors_have_ollamas_form(full, path, body, status, message) -> None:
    assert message in assert_error(full.post(path, json=body), status).lower()

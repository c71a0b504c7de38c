"""The APIs of text-embeddings-inference and embedding-server: native vectors in their form."""

import re

import pytest

from app.dialects import tei
from smart_embedder.requests import ANSWER_BYTES
from tests.app.conftest import answered as post
from tests.app.conftest import metric
from tests.app.dialects.conftest import dense, native
from tests.support.checkpoints import corpus

TEXTS = [*corpus(7, seed=3), "", "naïve 检索 search"]
LONG = "search " * 400
TIMES = ["total", "tokenization", "queue", "inference"]


def assert_error(answer, status: int, kind: str) -> str:
    error = answer.json()
    assert (answer.status_code, error["error_type"]) == (status, kind), error
    assert list(error) == ["error", "error_type"]
    return error["error"]


def test_dense_vectors_are_the_native_ones_to_the_last_bit(client) -> None:
    expected = dense(client, TEXTS)
    for path in ("/embed", "/models/tiny-m3-embed/embed/", "", "/models/TINY-m3-embed/"):
        assert post(client, path, inputs=TEXTS) == expected
    assert post(client, "/", inputs=TEXTS[0]) == expected[:1]


def test_headers_have_the_size_and_the_times_of_the_request(client) -> None:
    answer = client.post("/embed", json={"inputs": TEXTS})
    usage = post(client, "/embeddings/", sentences=TEXTS)["usage"]
    assert int(answer.headers["x-compute-tokens"]) == usage["total_tokens"]
    assert int(answer.headers["x-compute-characters"]) == sum(map(len, TEXTS))
    assert answer.headers["x-compute-type"] == "cpu"
    times = [int(answer.headers[f"x-{name}-time"]) for name in TIMES]
    assert max(times) == times[0] == int(answer.headers["x-compute-time"])


def test_sparse_vectors_are_pairs_of_index_and_value(client) -> None:
    answer = post(client, "/embed_sparse", inputs=TEXTS)
    for weights, expected in zip(answer, native(client, TEXTS), strict=True):
        assert [weight["index"] for weight in weights] == expected["sparse"]["indices"]
        assert [weight["value"] for weight in weights] == expected["sparse"]["values"]


@pytest.mark.parametrize("raw", [False, True])
def test_ranks_are_the_native_scores_as_probabilities_or_raw(full, raw) -> None:
    expected = post(full, "/rerank", query="search", passages=TEXTS, normalize=not raw)["results"]
    for path in ("/rerank", "/v1/rerank", "/models/tiny-reranker/rerank"):
        ranks = post(full, path, query="search", texts=TEXTS, raw_scores=raw)
        assert ranks == [{"index": item["index"], "score": item["score"]} for item in expected]
    ranks = post(full, "/rerank", query="search", texts=TEXTS, return_text="true")
    assert [rank["text"] for rank in ranks] == [TEXTS[item["index"]] for item in expected]


@pytest.mark.parametrize("path", ["/embed", "/embed_sparse"])
def test_a_long_text_is_cut_and_422_without_truncation(full, path) -> None:
    path = f"/models/tiny-m3{path}"
    body = {"inputs": ["bread " + LONG + "kitchen"]}
    for direction in (None, "Left"):
        options = {"truncate": False, "truncation_direction": direction}
        refused = full.post(path, json=body | options)
        assert "404 tokens" in assert_error(refused, 422, "Validation")
    begin, end = (
        post(full, path, inputs=text)
        for text in ("bread " + "search " * 297, "search " * 297 + "kitchen")
    )
    assert post(full, path, **body) == begin
    for direction, rest in (("Left", end), ("LEFT", end), ("Right", begin), (None, begin)):
        cut = post(full, path, **body, truncate=None, truncation_direction=direction)
        assert cut == rest, direction


def test_rerank_cuts_long_texts_and_is_422_without_truncation(full) -> None:
    texts = ["bread " + LONG, "search"]
    expected = post(full, "/rerank", query="bread", passages=texts, normalize=True)["results"]
    ranks = post(full, "/rerank", query="bread", texts=texts)
    assert ranks == [{"index": item["index"], "score": item["score"]} for item in expected]
    refused = full.post("/rerank", json={"query": "bread", "texts": texts, "truncate": False})
    assert "401 tokens" in assert_error(refused, 422, "Validation")


def test_options_are_the_native_ones_and_unsupported_ones_are_422(client, full) -> None:
    for extra in ({"dimensions": 32}, {"dimensions": 65}, {"prompt_name": "query"}):
        refused = client.post("/embed", json={"inputs": "a"} | extra)
        assert next(iter(extra)) in assert_error(refused, 422, "Validation")
    assert post(client, "/embed", inputs="a", dimensions=64, normalize=True)
    raw = post(full, "/embed", inputs="search", normalize=False)
    assert raw == dense(full, ["search"], normalize_dense=False)
    options = {"prompt_name": "query", "dimensions": 32}
    assert post(full, "/embed", inputs=TEXTS, **options) == dense(full, TEXTS, **options)
    tokens = post(full, "/tokenize", inputs=TEXTS, prompt_name="query")
    answer = full.post("/embed", json={"inputs": TEXTS, "prompt_name": "query"})
    assert int(answer.headers["x-compute-tokens"]) == sum(map(len, tokens))


def test_tokenize_returns_the_tokens_that_are_counted(full) -> None:
    for model in ("tiny-qwen", "tiny-reranker"):
        path = f"/models/{model}"
        tokens = post(full, f"{path}/tokenize", inputs=TEXTS)
        plain = [[token for token in of_text if not token["special"]] for of_text in tokens]
        for text, of_text in zip(TEXTS, plain, strict=True):
            assert all(text[token["start"] : token["stop"]] == token["text"] for token in of_text)
        assert post(full, f"{path}/tokenize", inputs=TEXTS, add_special_tokens=False) == plain
        if model != "tiny-reranker":
            answer = full.post(f"{path}/embed", json={"inputs": TEXTS})
            assert int(answer.headers["x-compute-tokens"]) == sum(map(len, tokens))


def test_tokenize_limits_a_text_only_by_the_size_of_the_answer(full, monkeypatch) -> None:
    """A text to embed would be cut at 32 characters for each of 300 tokens."""
    path = "/models/tiny-m3/tokenize"
    (tokens,) = post(full, path, inputs="a" + " " * 20_001 + "b")
    assert tokens[-2]["stop"] == 20_003
    (tokens,) = post(full, path, inputs="search " * 2000)
    assert len(tokens) == 2002
    monkeypatch.setattr(tei, "_BYTES_PER_TOKEN", ANSWER_BYTES // 1000)
    refused = full.post(path, json={"inputs": "search " * 2000})
    assert "tokens of these texts need" in assert_error(refused, 422, "Validation")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": ["a"] * 41}, 422, "Validation"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation"),
        ("/tokenize", {"inputs": "a", "prompt_name": "no"}, 422, "Validation"),
        ("/rerank", {"query": " ", "texts": ["a"]}, 400, "Empty"),
        ("/models/nobody/embed", {"inputs": "a"}, 404, "Validation"),
        ("/models/tiny-m3/rerank", {"query": "a", "texts": ["a"]}, 422, "Validation"),
        ("/models/tiny-qwen/embed_sparse", {"inputs": "a"}, 422, "Validation"),
        ("/models/tiny-m3/nothing", {}, 404, "Validation"),
        ("/", {}, 422, "Validation"),
    ],
)  # fmt: skip
def test_errors_have_teis_form(full, path, body, status, kind) -> None:
    assert_error(full.post(path, json=body), status, kind)
    assert post(full, "/embed", inputs="a")


def test_the_path_of_a_model_embeds_or_reranks(full) -> None:
    assert post(full, "/models/tiny-qwen", inputs="a") == post(full, "/", inputs="a")
    expected = dense(full, ["a"], model="tiny-m3")
    assert post(full, "/models/tiny-m3", inputs="a") == expected
    for path in ("/models/tiny-m3/v1/embeddings", "/models/tiny-m3/embeddings"):
        answer = post(full, path, input="a", model="whatever")
        assert answer["model"] == "tiny-m3"
        assert [item["embedding"] for item in answer["data"]] == expected
    before = metric(full, "rerank_requests_total", status="success")
    ranks = post(full, "/models/tiny-reranker", query="search", texts=TEXTS)
    assert ranks == post(full, "/rerank", query="search", texts=TEXTS)
    assert metric(full, "rerank_requests_total", status="success") == before + 2
    refused = full.get("/models/tiny-m3/embed")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    # OpenAI's clients describe a model with this path.
    assert full.get("/models/tiny-m3").json()["id"] == "tiny-m3"


def test_embedding_server_returns_native_vectors_usage_timings_and_teis_errors(client) -> None:
    answer = post(client, "/api/v1/embed", inputs=TEXTS)
    assert list(answer) == ["data", "usage", "timings"]
    assert [item["embedding"] for item in answer["data"]] == dense(client, TEXTS)
    assert [item["index"] for item in answer["data"]] == list(range(len(TEXTS)))
    assert answer["usage"] == post(client, "/embeddings/", sentences=TEXTS)["usage"]
    assert list(answer["timings"]) == ["tokenization", "queue", "inference"]
    for duration in answer["timings"].values():
        assert re.fullmatch(r"[\d.]+(e[+-]\d+)?(µs|ms|s)", duration)
    for body in ({"inputs": [1, 2, 3]}, {"inputs": "search " * 60_000, "truncate": False}):
        assert_error(client.post("/api/v1/embed", json=body), 422, "Validation")

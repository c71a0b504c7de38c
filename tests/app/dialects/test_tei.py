"""text-embeddings-inference and embedding-server: the native numbers in their shapes."""

import re

import pytest

from tests.app.conftest import answered as post
from tests.app.conftest import metric
from tests.app.dialects.conftest import NO_TOKEN, dense, native
from tests.support.checkpoints import corpus

TEXTS = [*corpus(7, seed=3), "", "naïve 检索 search"]
LONG = "search " * 400
TIMES = ["total", "tokenization", "queue", "inference"]


def assert_error(answer, status: int, kind: str) -> str:
    error = answer.json()
    assert (answer.status_code, error["error_type"]) == (status, kind), error
    assert list(error) == ["error", "error_type"]
    return error["error"]


@pytest.mark.parametrize(
    "path",
    [
        *["/embed", "/models/tiny-m3/embed", "/models/tiny-m3-embed/embed/"],
        *["", "/", "/models/tiny-m3", "/models/TINY-m3-embed/"],
    ],
)
def test_dense_vectors_are_the_native_ones_to_the_last_bit(client, path) -> None:
    expected = dense(client, TEXTS)
    assert post(client, path, inputs=TEXTS) == expected
    assert post(client, path, inputs=TEXTS[0]) == expected[:1]


def test_headers_tell_what_was_computed_and_how_long_it_took(client) -> None:
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
        assert [each["index"] for each in weights] == expected["sparse"]["indices"]
        assert [each["value"] for each in weights] == expected["sparse"]["values"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/models/tiny-reranker/rerank"])
@pytest.mark.parametrize("raw", [False, True])
def test_ranks_are_the_native_scores_as_probabilities_or_raw(full, path, raw) -> None:
    ours = post(full, "/rerank", query="search", passages=TEXTS, normalize=not raw)["results"]
    ranks = post(full, path, query="search", texts=TEXTS, raw_scores=raw)
    assert ranks == [{"index": each["index"], "score": each["score"]} for each in ours]
    told = post(full, path, query="search", texts=TEXTS, return_text="true")
    assert [each["text"] for each in told] == [TEXTS[each["index"]] for each in ours]


@pytest.mark.parametrize("path", ["/embed", "/embed_sparse"])
def test_a_text_that_is_too_long_is_an_error_unless_it_may_be_cut(full, path) -> None:
    path = f"/models/tiny-m3{path}"
    body = {"inputs": ["bread " + LONG + "kitchen"]}
    for truncate in (None, False):
        refused = full.post(path, json=body | {"truncate": truncate})
        assert "404 tokens" in assert_error(refused, 422, "Validation")
    for direction, rest in (
        ("Left", "search " * 297 + "kitchen"), ("LEFT", "search " * 297 + "kitchen"),
        ("Right", "bread " + "search " * 297), (None, "bread " + "search " * 297),
    ):  # fmt: skip
        cut = post(full, path, **body, truncate=True, truncation_direction=direction)
        assert cut == post(full, path, inputs=rest), direction


def test_options_are_the_native_ones_and_what_cannot_be_had_is_an_error(client, full) -> None:
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


def test_tokens_are_those_that_are_counted(full) -> None:
    for model in ("tiny-m3", "tiny-qwen", "tiny-reranker"):
        path = f"/models/{model}"
        tokens = post(full, f"{path}/tokenize", inputs=TEXTS)
        plain = [[each for each in own if not each["special"]] for own in tokens]
        for text, own in zip(TEXTS, plain, strict=True):
            assert all(text[each["start"] : each["stop"]] == each["text"] for each in own)
        assert post(full, f"{path}/tokenize", inputs=TEXTS, add_special_tokens=False) == plain
        if model != "tiny-reranker":
            answer = full.post(f"{path}/embed", json={"inputs": TEXTS})
            assert int(answer.headers["x-compute-tokens"]) == sum(map(len, tokens))


def test_only_what_the_answer_holds_limits_a_text_that_is_tokenised(client) -> None:
    (tokens,) = post(client, "/tokenize", inputs="a" + " " * 1_000_001 + "b")
    assert tokens[-2]["stop"] == 1_000_003
    (tokens,) = post(client, "/tokenize", inputs="search " * 20_000)
    assert len(tokens) == 20_002
    refused = client.post("/tokenize", json={"inputs": "a " * 1_000_000})
    assert "tokens of these texts need" in assert_error(refused, 422, "Validation")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": ["a"] * 41}, 422, "Validation"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation"),
        ("/embed_sparse", {"inputs": [[1]]}, 422, "Validation"),
        ("/tokenize", {"inputs": "a", "prompt_name": "no"}, 422, "Validation"),
        ("/rerank", {"query": " ", "texts": ["a"]}, 400, "Empty"),
        ("/models/nobody/embed", {"inputs": "a"}, 404, "Validation"),
        ("/models/tiny-reranker/embed", {"inputs": "a"}, 422, "Validation"),
        ("/models/tiny-m3/rerank", {"query": "a", "texts": ["a"]}, 422, "Validation"),
        ("/models/tiny-qwen/embed_sparse", {"inputs": "a"}, 422, "Validation"),
        ("/models/tiny-m3/nothing", {}, 404, "Validation"),
        ("/models/nobody", {"inputs": "a"}, 404, "Validation"),
        ("/", {}, 422, "Validation"),
        ("/", {"query": "a", "texts": ["a"]}, 422, "Validation"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_teis_shape(full, path, body, status, kind) -> None:
    assert_error(full.post(path, json=body), status, kind)
    assert post(full, "/embed", inputs="a")


def test_health_is_public_and_the_rest_is_refused_in_its_shape(full) -> None:
    for path in ("/ping", "/models/tiny-m3/health", "/models/tiny-m3/ping"):
        for method in ("GET", "HEAD"):
            answer = full.request(method, path, headers=NO_TOKEN)
            assert (answer.status_code, answer.content) == (200, b"")
    for path in ("/info", "/models/tiny-m3/info", "/models/health/info"):
        assert_error(full.get(path, headers=NO_TOKEN), 401, "Unauthorized")
    for path in ("/embed", "/models/tiny-m3/embed", "/tokenize", "/models/ping"):
        assert_error(full.post(path, headers=NO_TOKEN), 401, "Unauthorized")
    refused = full.post("/", json={"inputs": "a"}, headers=NO_TOKEN)
    assert (refused.status_code, refused.json()["error_type"]) == (401, "Unauthorized")


def test_a_model_itself_does_what_it_is_for(full) -> None:
    assert post(full, "/models/tiny-qwen", inputs="a") == post(full, "/", inputs="a")
    expected = dense(full, ["a"], model="tiny-m3")
    assert post(full, "/models/tiny-m3", inputs="a") == expected
    for path in ("/models/tiny-m3/v1/embeddings", "/models/tiny-m3/embeddings"):
        answer = post(full, path, input="a", model="whatever")
        assert answer["model"] == "tiny-m3"
        assert [each["embedding"] for each in answer["data"]] == expected
    before = metric(full, "rerank_requests_total", status="success")
    ranks = post(full, "/models/tiny-reranker", query="search", texts=TEXTS)
    assert ranks == post(full, "/rerank", query="search", texts=TEXTS)
    assert metric(full, "rerank_requests_total", status="success") == before + 2
    for path in ("/models/tiny-m3", "/models/tiny-m3/embed"):
        refused = full.get(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_embedding_server_has_the_native_vectors_usage_times_and_teis_errors(client) -> None:
    answer = post(client, "/api/v1/embed", inputs=TEXTS)
    assert list(answer) == ["data", "usage", "timings"]
    assert [each["embedding"] for each in answer["data"]] == dense(client, TEXTS)
    assert [each["index"] for each in answer["data"]] == list(range(len(TEXTS)))
    assert answer["usage"] == post(client, "/embeddings/", sentences=TEXTS)["usage"]
    assert list(answer["timings"]) == ["tokenization", "queue", "inference"]
    for each in answer["timings"].values():
        assert re.fullmatch(r"[\d.]+(e[+-]\d+)?(µs|ms|s)", each)
    for inputs in ([1, 2, 3], "search " * 60_000):
        assert_error(client.post("/api/v1/embed", json={"inputs": inputs}), 422, "Validation")

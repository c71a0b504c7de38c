"""text-embeddings-inference: the native numbers in its shapes, at the root and for one model."""

import numpy as np
import pytest

from tests.api.conftest import answered as post
from tests.api.dialects.conftest import native
from tests.support.checkpoints import corpus

TEXTS = [*corpus(7, seed=3), "", "naïve 检索 search"]
LONG = "search " * 400
COMPUTED = ["type", "time", "characters", "tokens"]
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
    expected = [each["dense"] for each in native(client, TEXTS)]
    assert post(client, path, inputs=TEXTS) == expected
    assert post(client, path, inputs=TEXTS[0]) == expected[:1]


def test_headers_tell_what_was_computed_and_how_long_it_took(client) -> None:
    answer = client.post("/embed", json={"inputs": TEXTS})
    names = [f"x-compute-{name}" for name in COMPUTED] + [f"x-{name}-time" for name in TIMES]
    assert set(names) <= set(answer.headers)
    usage = client.post("/embeddings/", json={"sentences": TEXTS}).json()["usage"]
    assert int(answer.headers["x-compute-tokens"]) == usage["total_tokens"]
    assert int(answer.headers["x-compute-characters"]) == sum(map(len, TEXTS))
    assert answer.headers["x-compute-type"] == "cpu"
    assert all(int(answer.headers[f"x-{name}-time"]) >= 0 for name in TIMES)


def test_sparse_vectors_are_pairs_of_index_and_value(client, full) -> None:
    answer = post(client, "/embed_sparse", inputs=TEXTS)
    for weights, expected in zip(answer, native(client, TEXTS), strict=True):
        assert [each["index"] for each in weights] == expected["sparse"]["indices"]
        assert [each["value"] for each in weights] == expected["sparse"]["values"]
    beside = post(full, "/embed_sparse", inputs=TEXTS)
    for weights, others in zip(answer, beside, strict=True):
        np.testing.assert_allclose(
            [list(each.values()) for each in weights],
            [list(each.values()) for each in others],
            rtol=0,
            atol=1e-6,
        )
    refused = full.post("/models/tiny-qwen/embed_sparse", json={"inputs": "a"})
    assert "tiny-qwen" in assert_error(refused, 422, "Validation")


@pytest.mark.parametrize("model", ["tiny-m3", "tiny-qwen"])
def test_embed_all_gives_the_state_of_every_token(full, model) -> None:
    states = post(full, f"/models/{model}/embed_all", inputs=TEXTS)
    tokens = post(full, f"/models/{model}/tokenize", inputs=TEXTS)
    assert [len(each) for each in states] == [len(each) for each in tokens]
    dense = post(full, f"/models/{model}/embed", inputs=TEXTS)
    place = -1 if model == "tiny-qwen" else 0
    for own, vector in zip(states, dense, strict=True):
        unit = np.array(own[place]) / np.linalg.norm(own[place])
        np.testing.assert_allclose(unit, vector, rtol=0, atol=1e-6)


def test_similarity_is_the_cosine_with_the_source(client) -> None:
    source, *others = native(client, ["hybrid search", *TEXTS])
    inputs = {"source_sentence": "hybrid search", "sentences": TEXTS}
    cosines = [np.dot(source["dense"], each["dense"]) for each in others]
    assert post(client, "/similarity", inputs=inputs) == pytest.approx(cosines, abs=1e-6)
    with_parameters = post(client, "/similarity", inputs=inputs, parameters={"truncate": True})
    assert with_parameters == pytest.approx(cosines, abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/models/tiny-reranker/rerank"])
def test_ranks_are_the_native_scores_as_probabilities(full, path) -> None:
    ours = full.post("/rerank", json={"query": "search", "passages": TEXTS, "normalize": True})
    expected = [(each["index"], each["score"]) for each in ours.json()["results"]]
    ranks = post(full, path, query="search", texts=TEXTS)
    assert [(each["index"], each["score"]) for each in ranks] == expected
    assert all(list(each) == ["index", "score"] for each in ranks)
    told = post(full, path, query="search", texts=TEXTS, return_text="true")
    assert [each["text"] for each in told] == [TEXTS[index] for index, _ in expected]


def test_raw_scores_are_the_models_own(full) -> None:
    ours = full.post("/rerank", json={"query": "search", "passages": TEXTS}).json()["results"]
    ranks = post(full, "/rerank", query="search", texts=TEXTS, raw_scores=True)
    assert [each["score"] for each in ranks] == [each["score"] for each in ours]


@pytest.mark.parametrize("truncate", [None, False])
@pytest.mark.parametrize("path", ["/embed", "/embed_sparse", "/embed_all"])
def test_a_text_that_is_too_long_is_an_error_unless_it_may_be_cut(full, path, truncate) -> None:
    path = f"/models/tiny-m3{path}"
    body = {"inputs": ["short", LONG]}
    refused = full.post(path, json=body | {"truncate": truncate})
    assert "402 tokens" in assert_error(refused, 422, "Validation")
    cut = post(full, path, **body, truncate=True)
    assert cut == post(full, path, inputs=["short", "search " * 298])


@pytest.mark.parametrize("direction", ["Left", "left", "LEFT"])
def test_the_beginning_is_cut_where_it_says_left(full, direction) -> None:
    text, path = "bread " + LONG + "kitchen", "/models/tiny-m3/embed"
    ours = {"truncation_side": "left", "return_colbert": False, "return_sparse": False}
    left = post(full, path, inputs=text, truncate=True, truncation_direction=direction)
    assert left != post(full, path, inputs=text, truncate=True, truncation_direction="Right")
    assert left != post(full, path, inputs=text, truncate=True)
    assert left == post(full, path, inputs="search " * 297 + "kitchen"), ours


def test_what_would_change_the_numbers_and_cannot_be_had_is_an_error(client, full) -> None:
    for extra in ({"dimensions": 32}, {"dimensions": 65}, {"prompt_name": "query"}):
        refused = client.post("/embed", json={"inputs": "a"} | extra)
        assert next(iter(extra)) in assert_error(refused, 422, "Validation")
    assert post(client, "/embed", inputs="a", dimensions=64, normalize=True)
    raw = post(full, "/embed", inputs="search", normalize=False)
    answer = full.post("/embeddings/", json={"sentences": ["search"]}).json()
    assert raw == [answer["data"][0]["embeddings"]["dense"]]


def test_a_prompt_is_read_where_the_dense_model_gives_its_states(full) -> None:
    tokens = post(full, "/tokenize", inputs=TEXTS, prompt_name="query")
    states = post(full, "/embed_all", inputs=TEXTS, prompt_name="query")
    assert list(map(len, states)) == list(map(len, tokens))


def test_a_prompt_and_fewer_dimensions_are_the_native_ones(full) -> None:
    options = {"prompt_name": "query", "dimensions": 32}
    kinds = {"return_sparse": False, "return_colbert": False}
    expected = native(full, TEXTS, **options, **kinds)
    assert post(full, "/embed", inputs=TEXTS, **options) == [each["dense"] for each in expected]


def test_tokens_are_those_that_are_counted_and_name_their_characters(full) -> None:
    for model in ("tiny-m3", "tiny-qwen", "tiny-reranker"):
        tokens = post(full, f"/models/{model}/tokenize", inputs=TEXTS)
        for text, own in zip(TEXTS, tokens, strict=True):
            plain = [each for each in own if not each["special"]]
            assert all(text[each["start"] : each["stop"]] == each["text"] for each in plain)
            alone = post(full, f"/models/{model}/tokenize", inputs=text, add_special_tokens=False)
            assert alone == [plain]
    answer = full.post("/models/tiny-m3/embed", json={"inputs": TEXTS})
    counted = sum(map(len, post(full, "/models/tiny-m3/tokenize", inputs=TEXTS)))
    assert int(answer.headers["x-compute-tokens"]) == counted


def test_token_ids_are_decoded_to_their_text(full) -> None:
    for model in ("tiny-m3", "tiny-qwen"):
        tokens = post(full, f"/models/{model}/tokenize", inputs=["hybrid search", "bread"])
        ids = [[each["id"] for each in own] for own in tokens]
        assert post(full, f"/models/{model}/decode", ids=ids) == ["hybrid search", "bread"]
        assert post(full, f"/models/{model}/decode", ids=ids[0]) == ["hybrid search"]
        whole = post(full, f"/models/{model}/decode", ids=ids[0], skip_special_tokens=False)
        assert whole[0] != "hybrid search"
    assert post(full, "/decode", ids=[4_000_000_000]) == [""]


def test_many_tokens_are_rendered_whole(client) -> None:
    (tokens,) = post(client, "/tokenize", inputs="search " * 20_000)
    assert len(tokens) == 20_002


def test_only_what_the_answer_holds_limits_a_text_that_is_tokenised(client) -> None:
    (tokens,) = post(client, "/tokenize", inputs="a" + " " * 1_000_001 + "b")
    assert tokens[-2]["stop"] == 1_000_003
    refused = client.post("/tokenize", json={"inputs": "a " * 1_000_000})
    assert "tokens of these texts need" in assert_error(refused, 422, "Validation")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {}, 422, "Validation"),
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": [1, 2]}, 422, "Validation"),
        ("/embed", {"inputs": ["a"] * 41}, 422, "Validation"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation"),
        ("/embed_all", {"inputs": [[1]]}, 422, "Validation"),
        ("/similarity", {"inputs": "a"}, 422, "Validation"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty"),
        ("/tokenize", {"inputs": None}, 422, "Validation"),
        ("/tokenize", {"inputs": "a", "prompt_name": "no"}, 422, "Validation"),
        ("/decode", {"ids": []}, 400, "Empty"),
        ("/decode", {"ids": [-1]}, 422, "Validation"),
        ("/decode", {"ids": "a"}, 422, "Validation"),
        ("/rerank", {"query": " ", "texts": ["a"]}, 400, "Empty"),
        ("/rerank", {"query": "a", "texts": [1]}, 422, "Validation"),
        ("/models/nobody/embed", {"inputs": "a"}, 404, "Validation"),
        ("/models/tiny-reranker/embed", {"inputs": "a"}, 422, "Validation"),
        ("/models/tiny-m3/rerank", {"query": "a", "texts": ["a"]}, 422, "Validation"),
        ("/models/tiny-m3/rerank", {"query": "a", "documents": ["a"]}, 422, "Validation"),
        ("/models/tiny-m3/nothing", {}, 404, "Validation"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_teis_shape(full, path, body, status, kind) -> None:
    assert_error(full.post(path, json=body), status, kind)
    assert post(full, "/embed", inputs="a")


def test_openai_bodies_are_read_for_one_model(full) -> None:
    for path in ("/models/tiny-m3/v1/embeddings", "/models/tiny-m3/embeddings"):
        answer = post(full, path, input="search", model="whatever")
        assert answer["model"] == "tiny-m3"
        assert [each["embedding"] for each in answer["data"]] == post(
            full, "/models/tiny-m3/embed", inputs="search"
        )


def test_info_tells_the_type_of_each_model(full) -> None:
    root = full.get("/info").json()
    assert (root["model_id"], root["auto_truncate"]) == ("tiny-qwen", False)
    assert root["model_type"] == {"embedding": {"pooling": "last_token"}}
    assert root["max_client_batch_size"] == 40
    own = full.get("/models/tiny-m3/info").json()
    assert own["model_type"] == {"embedding": {"pooling": "cls"}}
    assert own["max_input_length"] == 300
    assert own["model_dtype"] == "float32"
    assert "reranker" in full.get("/models/rerank-v3.5/info").json()["model_type"]
    assert_error(full.get("/models/nobody/info"), 404, "Validation")


def test_health_is_public_and_the_rest_is_not(full_server) -> None:
    with full_server.client() as client:
        for path in ("/ping", "/models/tiny-m3/health", "/models/tiny-m3/ping"):
            assert (client.get(path).status_code, client.get(path).content) == (200, b"")
            assert client.head(path).status_code == 200
        for path in ("/info", "/models/tiny-m3/info", "/models/health/info"):
            assert_error(client.get(path), 401, "Unauthorized")
        for path in ("/embed", "/models/tiny-m3/embed", "/decode", "/models/ping"):
            assert_error(client.post(path, json={"inputs": "a"}), 401, "Unauthorized")


def test_a_model_itself_does_what_it_is_for(full, full_server) -> None:
    assert post(full, "/models/tiny-qwen", inputs="a") == post(full, "/", inputs="a")
    assert post(full, "/models/tiny-m3", inputs="a") == post(
        full, "/models/tiny-m3/embed", inputs="a"
    )
    counted = [f'{kind}_requests_total{{status="success"}}' for kind in ("rerank",)]
    before = [full_server.metric(each) for each in counted]
    ranks = post(full, "/models/tiny-reranker", query="search", texts=TEXTS)
    assert ranks == post(full, "/rerank", query="search", texts=TEXTS)
    assert [full_server.metric(each) for each in counted] == [each + 2 for each in before]


def test_what_is_wrong_at_the_root_is_said_in_teis_shape(full, full_server) -> None:
    for body in ({}, {"query": "a", "texts": ["a"]}, {"inputs": [1]}):
        assert_error(full.post("/", json=body), 422, "Validation")
    assert "nobody" in assert_error(
        full.post("/models/nobody", json={"inputs": "a"}), 404, "Validation"
    )
    with full_server.client() as client:
        refused = client.post("/", json={"inputs": "a"})
        assert (refused.status_code, refused.json()["error_type"]) == (401, "Unauthorized")
        assert client.get("/").json()["service"] == "Smart Embedder"


def test_a_wrong_method_below_a_model_is_told_the_allowed_one(full) -> None:
    for path in ("/models/tiny-m3", "/models/tiny-m3/embed"):
        answer = full.get(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")

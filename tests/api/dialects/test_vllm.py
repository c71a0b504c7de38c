"""vLLM's scores: the native ones as probabilities, for one text with many or pair by pair."""

import pytest

from tests.api.conftest import answered, metric

TEXTS = ["hybrid search", "bread kitchen", "search", "winter garden", "search"]


def post(client, path: str = "/v1/score", **body) -> dict:
    return answered(client, path, **body)


def scores(answer: dict) -> list[float]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["score"] for item in answer["data"]]


def native(client, query: str, passages: list[str], **body) -> tuple[list[float], int]:
    """Scores in the order of the request, and how many tokens were read."""
    body = {"query": query, "passages": passages, "normalize": True} | body
    answer = answered(client, "/rerank", **body)
    ranked = sorted(answer["results"], key=lambda item: item["index"])
    return [item["score"] for item in ranked], answer["usage"]["total_tokens"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_text_is_scored_with_each_of_the_others(full, path) -> None:
    answer = post(full, path, text_1="search", text_2=TEXTS, model="tiny-reranker")
    assert (scores(answer), answer["usage"]["total_tokens"]) == native(full, "search", TEXTS)
    assert list(answer) == ["id", "object", "created", "model", "data", "usage"]
    assert answer["data"][0]["object"] == "score"
    for name in ("use_activation", "activation"):
        raw = post(full, path, text_1="search", text_2=TEXTS, **{name: False})
        assert scores(raw) == native(full, "search", TEXTS, normalize=False)[0]


def test_two_lists_are_scored_pair_by_pair_in_one_forward(full) -> None:
    queries = ["search", "bread", "search", "winter", "bread"]
    alone = [native(full, query, [text]) for query, text in zip(queries, TEXTS, strict=True)]
    counter = "rerank_inference_duration_seconds_count"
    before = metric(full, counter)
    answer = post(full, text_1=queries, text_2=TEXTS)
    assert metric(full, counter) == before + 1
    assert scores(answer) == pytest.approx([score for (score,), _ in alone], abs=1e-6)
    assert answer["usage"]["total_tokens"] == sum(tokens for _, tokens in alone)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"text_1": "a"}, 400, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "holds 2 texts and text_2 3"),
        ({"text_1": ["a"], "text_2": []}, 400, "text_2"),
        ({"text_1": [], "text_2": ["a"]}, 400, "text_1"),
        ({"text_1": ["a", " "], "text_2": ["a", "b"]}, 400, "blank"),
        ({"text_1": "a", "text_2": ["a"] * 41}, 400, "MAX_RERANK_PASSAGES"),
        # What it shares with Cohere's: test_cohere.py.
        ({"text_1": "a", "text_2": "b", "padding": "max_length"}, 400, "padding"),
        ({"text_1": "a", "text_2": "b", "instruction": "Find it"}, 400, "instruction"),
        ({"text_1": "a", "text_2": "search " * 9000, "truncate": False}, 400, "has 9000 tokens"),
        ({"queries": "a", "documents": "b"}, 400, "text_1 is missing, and queries is none"),
        ({"text_1": "a", "text_2": "b", "model": "nobody"}, 404, "nobody"),
    ],
)
def test_what_is_wrong_is_said_in_vllms_shape(full, body, status, said) -> None:
    answer = full.post("/score", json=body)
    error = answer.json()
    assert answer.status_code == status
    assert said in error["message"]
    assert error["code"] == error["error"]["code"] == status
    assert (error["object"], error["error"]["message"]) == ("error", error["message"])

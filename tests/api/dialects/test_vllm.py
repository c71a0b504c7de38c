"""vLLM's scores: the native ones as probabilities, for one text with many or pair by pair."""

import pytest

from tests.api.conftest import answered, metric

TEXTS = ["hybrid search", "bread kitchen", "search", "winter garden", "search"]


def post(client, path: str = "/v1/score", **body) -> dict:
    return answered(client, path, **body)


def scores(answer: dict) -> list[float]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["score"] for item in answer["data"]]


def native(client, query: str, passages: list[str], **body) -> dict:
    body = {"query": query, "passages": passages, "normalize": True} | body
    return client.post("/rerank", json=body).json()


def in_order(answer: dict) -> list[float]:
    return [item["score"] for item in sorted(answer["results"], key=lambda item: item["index"])]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_text_is_scored_with_each_of_the_others(full, path) -> None:
    answer = post(full, path, text_1="search", text_2=TEXTS, model="tiny-reranker")
    expected = native(full, "search", TEXTS)
    assert scores(answer) == in_order(expected)
    assert answer["usage"] == expected["usage"]
    assert list(answer) == ["id", "object", "created", "model", "data", "usage"]
    assert answer["data"][0]["object"] == "score"
    for name in ("use_activation", "activation"):
        raw = post(full, path, text_1="search", text_2=TEXTS, **{name: False})
        assert scores(raw) == in_order(native(full, "search", TEXTS, normalize=False))


def test_two_lists_are_scored_pair_by_pair_in_one_forward(full) -> None:
    queries = ["search", "bread", "search", "winter", "bread"]
    alone = [native(full, *pair) for pair in zip(queries, [[text] for text in TEXTS], strict=True)]
    counter = "rerank_inference_duration_seconds_count"
    before = metric(full, counter)
    answer = post(full, text_1=queries, text_2=TEXTS)
    assert metric(full, counter) == before + 1  # One forward for all of them.
    assert scores(answer) == pytest.approx([in_order(each)[0] for each in alone], abs=1e-6)
    assert answer["usage"]["total_tokens"] == sum(each["usage"]["total_tokens"] for each in alone)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"text_1": "a"}, 400, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "holds 2 texts and text_2 3"),
        ({"text_1": ["a"], "text_2": []}, 400, "text_2"),
        ({"text_1": [], "text_2": ["a"]}, 400, "text_1"),
        ({"text_1": [], "text_2": []}, 400, "text_1"),
        ({"text_1": ["a", " "], "text_2": ["a", "b"]}, 400, "blank"),
        ({"text_1": " ", "text_2": "a"}, 400, "blank"),
        ({"text_1": "a", "text_2": ["a"] * 41}, 400, "MAX_RERANK_PASSAGES"),
        *[
            ({"text_1": "a", "text_2": "b", name: value}, 400, name)
            for name, value in (
                ("truncate_prompt_tokens", 8),
                ("max_tokens_per_query", 8),
                ("add_special_tokens", False),
                ("padding", "max_length"),
                ("chat_template", "a"),
                ("chat_template_kwargs", {"instruction": "a"}),
                ("instruction", "Find it"),
            )
        ],
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

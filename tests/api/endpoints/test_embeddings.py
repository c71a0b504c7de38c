"""POST /embeddings/: the whole contract of the endpoint. Its numbers are those of the oracle."""

import orjson
import pytest

from tests.api.conftest import answered

KINDS = ("dense", "sparse", "colbert")


def post(client, **body):
    return answered(client, "/embeddings/", **body)


def test_the_answer_has_exactly_the_fields_of_the_contract_and_all_kinds(client) -> None:
    answer = post(client, sentences=["hybrid search"])
    names = ["model_name", "dense_model_name", "sparse_model_name", "colbert_model_name"]
    rest = ["vector_space", "precision"]
    rest += ["processing_time_ms", "warnings", "usage", "timings_ms"]
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


def test_a_kind_not_asked_for_is_null(client) -> None:
    for kind in KINDS:
        wanted = {f"return_{other}": other == kind for other in KINDS}
        embeddings = post(client, sentences=["search"], **wanted)["data"][0]["embeddings"]
        assert list(embeddings) == list(KINDS)
        assert [other for other in KINDS if embeddings[other] is not None] == [kind]


def test_an_over_long_text_is_embedded_and_reported(client) -> None:
    answer = post(client, sentences=["short", "search " * 9000], return_colbert=False)
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


def test_a_large_answer_has_no_length_and_all_that_was_counted(client) -> None:
    texts = [f"search {i} " + "vector " * 300 for i in range(24)]
    uncompressed = {"Accept-Encoding": "identity"}
    response = client.post("/embeddings/", json={"sentences": texts}, headers=uncompressed)
    assert "content-length" not in response.headers
    assert len(response.content) > 4 << 20
    answer = orjson.loads(response.content)
    assert [item["id"] for item in answer["data"]] == list(range(24))
    counts = [len(item["embeddings"]["colbert"]) for item in answer["data"]]
    assert sum(counts) == answer["usage"]["prompt_tokens"] - 24

"""POST /rerank: all kinds of rerankers, warnings, and invalid input."""

from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from tests.app.conftest import answered, serving
from tests.smart_embedder.fakes import FakeModel, loaded
from tests.support.checkpoints import changed_weights, corpus
from tests.support.in_process import served

NO_WEIGHT = {"dense": 0, "sparse": 0, "colbert": 0}
PASSAGES = [*corpus(12, seed=5), "", "hybrid search vector"]


@pytest.fixture(scope="module")
def qwen_client(tiny_m3: Path, tiny_qwen: Path):
    """A client of a service with bge-m3, a Qwen dense model and a Qwen reranker."""
    with serving(
        embedding_model=f"{tiny_m3}/",
        dense_embedding_model=f"{tiny_qwen}//",
        reranker_model=str(tiny_qwen),
        qwen_rerank_batch_size=4,
        qwen_rerank_max_length=400,
        qwen_embed_max_length=50,
        max_batch_tokens=8192,
    ) as client:
        yield client


def post(client, **body) -> dict:
    return answered(client, "/rerank", **body)


def assert_sorted(answer: dict, passages: list[str]) -> None:
    scores = [item["score"] for item in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(item["index"] for item in answer["results"]) == list(range(len(passages)))
    assert all(item["passage"] == passages[item["index"]] for item in answer["results"])


def test_late_interaction_has_the_documented_fields(client, tiny_m3) -> None:
    answer = post(client, query="hybrid search", passages=PASSAGES)
    rest = ["vector_space", "processing_time_ms", "warnings", "usage", "timings_ms"]
    assert list(answer) == ["results", "model_name", *rest]
    assert answer["model_name"] == tiny_m3.name
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    assert_sorted(answer, PASSAGES)
    for item in answer["results"]:
        assert list(item) == ["index", "passage", "score", "parts"]
        assert sum(item["parts"].values()) / 3 == pytest.approx(item["score"], abs=1e-6)
    weights = {"dense": 1, "sparse": 0, "colbert": 0}
    answer = post(client, query="hybrid search", passages=PASSAGES, weights=weights)
    assert all(item["score"] == item["parts"]["dense"] for item in answer["results"])


def test_every_dialect_ranks_by_raw_logits_whose_sigmoids_are_equal(
    tiny_m3: Path, tiny_reranker: Path, tmp_path: Path
) -> None:
    folder = copytree(tiny_reranker, tmp_path / "sure")
    with changed_weights(folder) as weights:
        weights["classifier.out_proj.bias"] += 60
    documents = {"query": "hybrid search", "documents": PASSAGES}
    texts = {"query": "hybrid search", "texts": PASSAGES}
    with serving(embedding_model=str(tiny_m3), reranker_model=str(folder)) as client:
        raw = post(client, query="hybrid search", passages=PASSAGES)["results"]
        native = post(client, query="hybrid search", passages=PASSAGES, normalize=True)["results"]
        cohere = answered(client, "/v2/rerank", **documents, top_n=5)["results"]
        tei = answered(client, "/rerank", **texts)
    order = [item["index"] for item in raw]
    assert order != sorted(order)
    assert {item["score"] for item in native} == {1.0}
    assert [item["index"] for item in native] == order
    assert [item["index"] for item in cohere] == order[:5]
    assert [item["index"] for item in tei] == order


@pytest.mark.parametrize(
    ("service", "option", "value", "is_used"),
    [
        ("client", "instruction", "x", False),
        ("qwen_client", "weights", {"dense": 2}, False),
        ("qwen_client", "instruction", "x", True),
    ],
)
def test_an_option_without_effect_is_422(
    request: pytest.FixtureRequest, service: str, option: str, value: object, is_used: bool
) -> None:
    """Null counts as not sent."""
    client, body = request.getfixturevalue(service), {"query": "search", "passages": ["a"]}
    assert post(client, **body, **{option: None})["results"]
    answer = client.post("/rerank", json=body | {option: value})
    assert answer.status_code == (200 if is_used else 422)
    if not is_used:
        assert answer.json()["code"] == "invalid_request"
        message = f"The option {option} has no effect with the reranker tiny-"
        assert answer.json()["detail"].startswith(message)


def test_a_response_has_dense_of_qwen_and_sparse_and_colbert_of_bge(
    qwen_client, client, tiny_m3, tiny_qwen
) -> None:
    texts = ["hybrid search", "vector " * 100, ""]
    answer = answered(qwen_client, "/embeddings/", sentences=texts)
    names = [answer[f"{kind}_model_name"] for kind in ("dense", "sparse", "colbert")]
    assert names == [tiny_qwen.name, tiny_m3.name, tiny_m3.name]
    assert answer["model_name"] == tiny_qwen.name
    (warning,) = answer["warnings"]
    assert (warning["details"]["model"], warning["details"]["max_tokens"]) == (tiny_qwen.name, 50)
    assert warning["target"]["pointer"] == "/sentences/1"
    bge_only = answered(client, "/embeddings/", sentences=texts)["data"]
    for item, other in zip(answer["data"], bge_only, strict=True):
        both, bge = item["embeddings"], other["embeddings"]
        np.testing.assert_allclose(both["colbert"], bge["colbert"], rtol=0, atol=1e-5)
        assert both["sparse"].keys() == bge["sparse"].keys()
        assert not np.allclose(both["dense"], bge["dense"], atol=1e-3)


@pytest.mark.parametrize(
    ("body", "status", "code", "message"),
    [
        # More errors of fields: test_error_responses.py.
        ({"query": " \t\n"}, 400, "empty_input", "The query is blank"),
        ({"passages": []}, 400, "empty_input", "The list passages is empty"),
        ({"passages": ["a", 1]}, 422, "invalid_request", "passages[1]"),
        ({"top_n": 3}, 422, "invalid_request", "top_n"),
        ({"passages": ["a"] * 1025}, 422, "invalid_request", "(MAX_RERANK_PASSAGES)"),
        ({"weights": NO_WEIGHT}, 422, "invalid_request", "one of them above 0"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_invalid_input_is_an_error_with_a_reason(client, body, status, code, message) -> None:
    response = client.post("/rerank", json={"query": "a", "passages": ["a"]} | body)
    assert (response.status_code, response.json()["code"]) == (status, code)
    assert message in response.json()["detail"]


async def test_without_a_reranker_it_is_503_and_the_error_names_the_setting() -> None:
    async with served(loaded(FakeModel()), reranker_model="none") as (_, client):
        body = {"query": "a", "passages": ["b"], "instruction": "which no reranker reads"}
        response = await client.post("/rerank", json=body)
        assert (response.status_code, response.json()["code"]) == (503, "reranker_disabled")
        assert "RERANKER_MODEL" in response.json()["detail"]
        assert "retry-after" not in response.headers
        assert (await client.get("/health")).json()["reranker_model"] == "none"


def test_no_response_has_a_path_of_the_machine(qwen_client, tiny_m3, tiny_qwen) -> None:
    long, options = "vector " * 100, {"return_colbert": False}
    embedded = qwen_client.post("/embeddings/", json={"sentences": [long]} | options)
    reranked = qwen_client.post("/rerank", json={"query": long * 4, "passages": [long * 5]})
    assert embedded.json()["warnings"]
    codes = [warning["code"] for warning in reranked.json()["warnings"]]
    assert codes == ["query_truncated", "passage_truncated"]
    refused = qwen_client.post("/rerank", json={"query": "a", "passages": "b"})
    pages = ("/", "/health", "/health/live", "/stats", "/metrics", "/openapi.json", "/docs")
    answers = [embedded, reranked, refused, *(qwen_client.get(page) for page in pages)]
    for folder in (tiny_m3.parent, tiny_qwen.parent, Path.cwd()):
        assert not [answer.url for answer in answers if str(folder) in answer.text]
    assert qwen_client.get("/health").json()["model"] == tiny_m3.name

"""Models of MODELS respond in every dialect as a service that has no other models does."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from app.settings import Settings
from smart_embedder.core import EngineCore
from smart_embedder.models_file import read_model_entries
from smart_embedder.requests import EmbedRequest, RerankRequest
from smart_embedder.startup import load_models
from tests.app.conftest import answered, metric, serving

TEXTS = ["hybrid search", "bread in the kitchen", "music"]
QUERY = "which bread"


@pytest.fixture(scope="module")
def client(tiny_m3: Path, tiny_qwen: Path, tiny_reranker: Path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    other, file = folder / "other-m3", folder / "models.yaml"
    other.symlink_to(tiny_m3)
    file.write_text(
        f"""
- name: {tiny_qwen}
  aliases: [dense-model]
- name: {tiny_reranker}
  task: rerank
  aliases: [judge]
  load: start
- name: {other}
  aliases: [never-asked-for]
""",
        "utf-8",
    )
    with serving(embedding_model=str(tiny_m3), models=read_model_entries(file)) as client:
        yield client


@pytest.fixture(scope="module")
def alone(tiny_qwen: Path, tiny_reranker: Path):
    """Vectors and scores of an engine that has only these models."""
    settings = Settings(
        embedding_model=str(tiny_qwen),
        reranker_model=str(tiny_reranker),
        device="cpu",
        dtype="float32",
    )

    async def compute():
        async with EngineCore(settings, load_models) as engine:
            embedded = await engine.embed(EmbedRequest(TEXTS, normalize_dense=True))
            ranked = await engine.rerank(RerankRequest(QUERY, TEXTS))
        return np.array([embedding.dense for embedding in embedded.embeddings]), ranked.scores

    return asyncio.run(compute())


def dense(answer: dict) -> np.ndarray:
    return np.array([item["embeddings"]["dense"] for item in answer["data"]])


def test_a_model_that_no_request_names_is_not_loaded(client) -> None:
    states = {model["id"]: model["state"] for model in client.get("/v1/models").json()["data"]}
    assert (states["never-asked-for"], states["other-m3"]) == ("unloaded", "unloaded")
    assert (states["judge"], states["tiny-m3"]) == ("ready", "ready")
    health = {model["name"]: model for model in client.get("/health").json()["served_models"]}
    assert (health["other-m3"]["state"], health["other-m3"]["info"]) == ("unloaded", None)
    kinds = {name: model["makes"] and model["makes"]["kinds"] for name, model in health.items()}
    all_kinds = ["dense", "sparse", "colbert"]
    assert kinds["other-m3"] is None
    assert health["other-m3"]["token_budgets"] == {}
    ready = [name for name, model in health.items() if model["state"] == "ready"]
    assert all(min(health[name]["token_budgets"].values()) >= 512 for name in ready)
    assert kinds["tiny-reranker"] == ["scores"]
    infos = [health[name]["info"] for name in ready]
    assert all(info["refused"] == [] for info in infos)
    assert all_kinds in kinds.values()
    assert metric(client, "embedder_model_state", model="other-m3", state="unloaded") == 1
    info = client.get("/models/other-m3/info")
    assert (info.status_code, info.json()["error_type"]) == (503, "Unhealthy")
    # Without tokens there is no operator who could load it.
    refused = client.post("/v1/models/other-m3/load")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_operator")


def test_vectors_of_every_dialect_equal_those_of_a_service_with_one_model(client, alone) -> None:
    expected, _ = alone
    named = {"model": "dense-model"}
    body = answered(client, "/embeddings/", sentences=TEXTS, normalize_dense=True, **named)
    np.testing.assert_allclose(dense(body), expected, atol=1e-6)
    assert body["model_name"] == body["sparse_model_name"] == body["dense_model_name"]
    assert body["data"][0]["embeddings"]["sparse"] is None
    name = body["model_name"]
    openai = answered(client, "/v1/embeddings", input=TEXTS, **named)
    assert openai["model"] == name
    cohere = answered(client, "/v2/embed", texts=TEXTS, model=name)
    tei = answered(client, f"/models/{name}/embed", inputs=TEXTS)
    of_openai = [item["embedding"] for item in openai["data"]]
    for found in (of_openai, cohere["embeddings"]["float"], tei):
        np.testing.assert_allclose(np.array(found), expected, atol=1e-6)
    tokens = answered(client, f"/models/{name}/tokenize", inputs="bread")
    assert tokens != answered(client, "/tokenize", inputs="bread")
    info = client.get(f"/models/{name}/info").json()
    assert (info["model_id"], "embedding" in info["model_type"]) == (name, True)


def test_scores_of_every_dialect_equal_those_of_a_service_with_one_model(client, alone) -> None:
    _, expected = alone
    probabilities = 1 / (1 + np.exp(-np.array(expected)))

    def assert_scores(ranked: list[dict], key: str, expected: np.ndarray) -> None:
        found = [item[key] for item in sorted(ranked, key=lambda item: item["index"])]
        np.testing.assert_allclose(found, expected, atol=1e-5)

    native = {"query": QUERY, "passages": TEXTS}
    answer = answered(client, "/rerank", **native, model="judge")
    assert_scores(answer["results"], "score", expected)
    cohere = answered(client, "/v2/rerank", query=QUERY, documents=TEXTS, model="judge")
    assert_scores(cohere["results"], "relevance_score", probabilities)
    tei = answered(client, "/models/judge/rerank", query=QUERY, texts=TEXTS)
    assert_scores(tei, "score", probabilities)
    assert answer["model_name"] == cohere["model"]
    assert answer["model_name"] != answered(client, "/rerank", **native)["model_name"]


def test_concurrent_requests_for_two_models_are_not_mixed(client, alone) -> None:
    """Requests may name the default embedder, too."""
    expected, _ = alone
    default = {"sentences": TEXTS, "normalize_dense": True}
    bodies = [default, default | {"model": "dense-model"}, default | {"model": "tiny-m3"}] * 3
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: answered(client, "/embeddings/", **body), bodies))
    for place, answer in enumerate(answers):
        own_vectors = expected if place % 3 == 1 else dense(answers[0])
        np.testing.assert_allclose(dense(answer), own_vectors, atol=1e-6)


NAMED = {"sentences": ["a"], "model": "dense-model"}
OPENAI = {"input": "a", "model": "dense-model"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/embeddings/", {"sentences": ["a"], "model": "judge"}, 404, "is not served here"),
        ("/rerank", {"query": "a", "passages": ["b"], "model": "dense-model"}, 404, "not served"),
        ("/embeddings/", NAMED | {"return_sparse": True}, 400, "kind_not_made"),
        ("/embeddings/", NAMED | {"return_dense": False}, 422, "No output is requested"),
        ("/v1/embeddings", OPENAI | {"return_colbert": True}, 400, "kind_not_made"),
        ("/models/dense-model/embed_sparse", {"inputs": ["a"]}, 400, "Sparse vectors are not made"),
        ("/models/dense-model/rerank", {"query": "a", "texts": ["b"]}, 422, "is no reranker"),
    ],
)
def test_a_request_for_an_unsupported_task_is_refused_in_one_sentence(
    client, path, body, status, message
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert message in answer.text

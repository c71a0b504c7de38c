"""Models of MODELS in every dialect: each answers as a service does that has it alone."""

import asyncio
from pathlib import Path

import httpx2
import numpy as np
import pytest

from smart_embedder.engine import Engine, RerankRequest
from smart_embedder.engine.records import EmbedRequest
from smart_embedder.models.load import load_models
from smart_embedder.settings import Settings
from tests.support.server import RunningServer, run_server

TEXTS = ["hybrid search", "bread in the kitchen", "music"]
QUERY = "which bread"


@pytest.fixture(scope="module")
def several(tiny_m3: Path, tiny_qwen: Path, tiny_reranker: Path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    other = folder / "other-m3"
    other.symlink_to(tiny_m3)
    (folder / "models.yaml").write_text(
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
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "MODELS": "models.yaml"}
    with run_server(folder, **settings) as server:
        server.wait_until_healthy()
        yield server


@pytest.fixture(scope="module")
def client(several: RunningServer):
    with several.client() as client:
        yield client


@pytest.fixture(scope="module")
def alone(tiny_qwen: Path, tiny_reranker: Path):
    """Vectors and scores of a service that has these models alone."""
    settings = Settings(
        embedding_model=str(tiny_qwen),
        reranker_model=str(tiny_reranker),
        device="cpu",
        dtype="float32",
    )

    async def compute():
        async with Engine(settings, load_models) as engine:
            embedded = await engine.embed(EmbedRequest(TEXTS, normalize_dense=True))
            ranked = await engine.rerank(RerankRequest(QUERY, TEXTS))
        return np.array([each.dense for each in embedded.embeddings]), ranked.scores

    return asyncio.run(compute())


def dense(answer: httpx2.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([each["embeddings"]["dense"] for each in answer.json()["data"]])


def test_a_model_that_was_never_asked_for_is_not_loaded(several: RunningServer, client) -> None:
    states = {each["id"]: each["state"] for each in client.get("/v1/models").json()["data"]}
    assert (states["never-asked-for"], states["other-m3"]) == ("unloaded", "unloaded")
    assert (states["judge"], states["tiny-m3"]) == ("ready", "ready")
    health = {each["name"]: each for each in client.get("/health").json()["served_models"]}
    assert (health["other-m3"]["state"], health["other-m3"]["info"]) == ("unloaded", None)
    kinds = {name: each["makes"] and each["makes"]["kinds"] for name, each in health.items()}
    made = ["dense", "sparse", "colbert"]
    assert kinds["other-m3"] is None
    assert health["other-m3"]["token_budgets"] == {}
    ready = [name for name, each in health.items() if each["state"] == "ready"]
    assert all(min(health[name]["token_budgets"].values()) >= 512 for name in ready)
    assert kinds["tiny-reranker"] == ["scores"]
    told = [health[name]["info"] for name in ready]
    assert all(each["refused"] == [] for each in told)
    assert made in kinds.values()
    assert several.metric('embedder_model_state{model="other-m3",state="unloaded"}') == 1
    info = client.get("/models/other-m3/info")
    assert (info.status_code, info.json()["error_type"]) == (503, "Unhealthy")


@pytest.mark.parametrize("what", ["load", "unload"])
def test_without_tokens_nobody_loads_or_unloads_by_command(client, what: str) -> None:
    refused = client.post(f"/v1/models/other-m3/{what}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_operator")


def test_vectors_of_every_dialect_are_those_of_the_model_alone(client, alone) -> None:
    expected, _ = alone
    native = {"sentences": TEXTS, "model": "dense-model", "normalize_dense": True}
    answer = client.post("/embeddings/", json=native)
    np.testing.assert_allclose(dense(answer), expected, atol=1e-6)
    body = answer.json()
    assert body["model_name"] == body["sparse_model_name"] == body["dense_model_name"]
    assert body["data"][0]["embeddings"]["sparse"] is None
    name = body["model_name"]
    openai = client.post("/v1/embeddings", json={"input": TEXTS, "model": "dense-model"}).json()
    assert openai["model"] == name
    cohere = client.post("/v2/embed", json={"texts": TEXTS, "model": name}).json()
    tei = client.post(f"/models/{name}/embed", json={"inputs": TEXTS}).json()
    of_openai = [each["embedding"] for each in openai["data"]]
    for found in (of_openai, cohere["embeddings"]["float"], tei):
        np.testing.assert_allclose(np.array(found), expected, atol=1e-6)
    tokens = client.post(f"/models/{name}/tokenize", json={"inputs": "bread"}).json()
    assert tokens != client.post("/tokenize", json={"inputs": "bread"}).json()
    info = client.get(f"/models/{name}/info").json()
    assert (info["model_id"], "embedding" in info["model_type"]) == (name, True)


def test_scores_of_every_dialect_are_those_of_the_model_alone(client, alone) -> None:
    _, expected = alone
    probabilities = 1 / (1 + np.exp(-np.array(expected)))

    def assert_scores(ranked: list[dict], key: str, expected: np.ndarray) -> None:
        found = [each[key] for each in sorted(ranked, key=lambda each: each["index"])]
        np.testing.assert_allclose(found, expected, atol=1e-5)

    native = {"query": QUERY, "passages": TEXTS, "model": "judge"}
    answer = client.post("/rerank", json=native).json()
    assert_scores(answer["results"], "score", expected)
    documents = {"query": QUERY, "documents": TEXTS, "model": "judge"}
    cohere = client.post("/v2/rerank", json=documents).json()
    assert_scores(cohere["results"], "relevance_score", probabilities)
    pairs = {"text_1": QUERY, "text_2": TEXTS, "model": "judge"}
    vllm = client.post("/score", json=pairs).json()
    assert_scores(vllm["data"], "score", probabilities)
    tei = client.post("/models/judge/rerank", json={"query": QUERY, "texts": TEXTS}).json()
    assert_scores(tei, "score", probabilities)
    assert answer["model_name"] == cohere["model"] == vllm["model"]
    default = client.post("/rerank", json=native | {"model": None}).json()
    assert answer["model_name"] != default["model_name"]


def test_a_stream_names_a_model(client, alone) -> None:
    expected, _ = alone
    lines = "".join(f'{{"text": "{text}"}}\n' for text in TEXTS)
    answer = client.post(
        "/embeddings/stream",
        params={"model": "dense-model", "normalize_dense": "true"},
        content=lines,
        headers={"Content-Type": "application/x-ndjson"},
    )
    assert answer.status_code == 200, answer.text
    records = [httpx2.Response(200, content=line).json() for line in answer.text.splitlines()]
    found = np.array([each["embeddings"].pop("dense") for each in records])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert {*records[0]["embeddings"].values()} == {None}, "what it does not make is left out"


def test_two_models_are_not_mixed_when_their_requests_come_together(several, alone) -> None:
    expected, _ = alone

    async def send() -> list[httpx2.Response]:
        async with several.async_client() as client:
            bodies = [{"sentences": TEXTS, "normalize_dense": True}] * 4
            named = [body | {"model": "dense-model"} for body in bodies]
            both = [body for pair in zip(bodies, named, strict=True) for body in pair]
            return await asyncio.gather(*(client.post("/embeddings/", json=body) for body in both))

    default, *_ = answers = asyncio.run(send())
    for place, answer in enumerate(answers):
        wanted = expected if place % 2 else dense(default)
        np.testing.assert_allclose(dense(answer), wanted, atol=1e-6)


NAMED = {"sentences": ["a"], "model": "dense-model"}
OPENAI = {"input": "a", "model": "dense-model"}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/embeddings/", {"sentences": ["a"], "model": "judge"}, 404, "is not served here"),
        ("/embeddings/", {"sentences": ["a"], "model": "nobody"}, 404, "is not served here"),
        ("/rerank", {"query": "a", "passages": ["b"], "model": "dense-model"}, 404, "not served"),
        ("/embeddings/", NAMED | {"return_sparse": True}, 400, "kind_not_made"),
        ("/embeddings/", NAMED | {"return_colbert": True}, 400, "kind_not_made"),
        ("/embeddings/", NAMED | {"return_dense": False}, 422, "Nothing is asked for"),
        ("/v1/embeddings", OPENAI | {"return_sparse": True}, 400, "kind_not_made"),
        ("/v1/embeddings", OPENAI | {"return_colbert": True}, 400, "kind_not_made"),
        ("/models/dense-model/embed_sparse", {"inputs": ["a"]}, 400, "Sparse vectors are not made"),
        ("/models/dense-model/rerank", {"query": "a", "texts": ["b"]}, 422, "is no reranker"),
    ],
)
def test_what_a_model_does_not_do_is_one_sentence(client, path, body, status, said) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert said in answer.text


def test_a_default_embedder_is_named_too(client) -> None:
    body = {"sentences": TEXTS}
    unnamed = client.post("/embeddings/", json=body).json()
    named = client.post("/embeddings/", json=body | {"model": unnamed["model_name"]}).json()
    assert named["data"] == unnamed["data"]

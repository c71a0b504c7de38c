"""Models of MODELS: their states before a request names them, and tasks that they refuse."""

import math
from pathlib import Path

import pytest

from smart_embedder.models_file import read_model_entries
from tests.app.conftest import metric, serving


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


NAMED = {"sentences": ["a"], "model": "dense-model"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/embeddings/", {"sentences": ["a"], "model": "judge"}, 404, "is not served here"),
        ("/rerank", {"query": "a", "passages": ["b"], "model": "dense-model"}, 404, "not served"),
        ("/embeddings/", NAMED | {"return_sparse": True}, 400, "kind_not_made"),
        ("/embeddings/", NAMED | {"return_dense": False}, 422, "No output is requested"),
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


def test_a_request_is_answered_by_the_model_that_it_names(client) -> None:
    body = {"query": "a", "passages": ["b"]}
    raw, normal = (
        client.post("/rerank", json=body | {"model": "judge", "normalize": normalize}).json()
        for normalize in (False, True)
    )
    assert raw["model_name"] == normal["model_name"] == "tiny-reranker"
    logit, probability = raw["results"][0]["score"], normal["results"][0]["score"]
    assert probability == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-6)
    assert "parts" not in raw["results"][0]
    default = client.post("/rerank", json=body).json()
    assert (default["model_name"], list(default["results"][0])[-1]) == ("tiny-m3", "parts")

"""The operator loads and unloads a model of MODELS by command, in a real process."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.server import run_server

OPERATOR = {"Authorization": "Bearer the-operators-token"}
SOMEBODY = {"Authorization": "Bearer somebodys-token"}
BODY = {"sentences": ["search"], "model": "further", "return_colbert": False}


@pytest.fixture(scope="module")
def server(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("commands")
    shutil.copytree(tiny_m3, folder / "further")
    (folder / "models.yaml").write_text("- name: ./further\n  task: embed\n  pinned: true\n")
    (folder / "tokens").write_text("operator:the-operators-token\nsomebody:somebodys-token\n")
    settings = {"MODELS": "models.yaml", "API_TOKENS_FILE": "tokens"}
    with run_server(folder, EMBEDDING_MODEL=str(tiny_m3), **settings) as running:
        running.wait_until_healthy()
        running.folder = folder
        yield running


def command(server, what: str, headers=OPERATOR, model: str = "further"):
    with server.client() as client:
        return client.post(f"/v1/models/{model}/{what}", headers=headers)


def dense(server) -> np.ndarray:
    with server.client() as client:
        answer = client.post("/embeddings/", json=BODY, headers=SOMEBODY)
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embeddings"]["dense"])


def test_a_model_is_loaded_replaced_and_loaded_again(server, demo_checkpoint: Path) -> None:
    loaded = command(server, "load")
    assert (loaded.status_code, loaded.json()["state"]) == (200, "ready"), loaded.text
    before = dense(server)
    assert command(server, "load").json()["state"] == "ready"
    unloaded = command(server, "unload")
    assert (unloaded.status_code, unloaded.json()["state"]) == (200, "unloaded"), unloaded.text
    assert command(server, "unload").json()["state"] == "unloaded"
    shutil.rmtree(server.folder / "further")
    shutil.copytree(demo_checkpoint, server.folder / "further")
    assert command(server, "load").json()["state"] == "ready"
    assert dense(server).shape != before.shape or not np.allclose(dense(server), before, atol=1e-3)
    (status,) = (
        each for each in server.get("/health").json()["served_models"] if each["name"] == "further"
    )
    assert status["files_replaced"] == 1
    assert server.metric('embedder_model_unloads_total{model="further"}') == 1
    assert server.log.count("model_files_replaced") == 1


@pytest.mark.parametrize("what", ["load", "unload"])
def test_nobody_else_gives_commands(server, what: str) -> None:
    refused = command(server, what, SOMEBODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_operator")
    assert "operator" in refused.json()["error"]["message"]
    assert command(server, what, {}).status_code == 401


@pytest.mark.parametrize("what", ["load", "unload"])
def test_a_default_model_and_one_that_nobody_has_take_no_commands(server, what: str) -> None:
    (default, *_) = (each["name"] for each in server.get("/health").json()["served_models"])
    for name in (default, "nobodys"):
        answer = command(server, what, model=name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

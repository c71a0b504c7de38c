"""Commands of the operator that load and unload a model of MODELS."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from smart_embedder.models_file import read_model_entries
from tests.app.conftest import answered, metric, serving

OPERATOR = {"Authorization": "Bearer the-operators-token"}
SOMEBODY = {"Authorization": "Bearer somebodys-token"}


@pytest.fixture(scope="module")
def folder(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    shutil.copytree(tiny_m3, folder / "further")
    entry = f"- name: {folder / 'further'}\n  task: embed\n  pinned: true\n"
    (folder / "models.yaml").write_text(entry)
    (folder / "tokens").write_text("operator:the-operators-token\nsomebody:somebodys-token\n")
    return folder


@pytest.fixture(scope="module")
def client(tiny_m3: Path, folder: Path):
    models = read_model_entries(folder / "models.yaml")
    tokens = folder / "tokens"
    with serving(embedding_model=str(tiny_m3), models=models, api_tokens_file=tokens) as client:
        client.headers.update(SOMEBODY)
        yield client


def send_command(client, command: str, headers=OPERATOR, model: str = "further"):
    return client.post(f"/v1/models/{model}/{command}", headers=headers)


def dense(client) -> np.ndarray:
    body = {"sentences": ["search"], "model": "further", "return_colbert": False}
    return np.array(answered(client, "/embeddings/", **body)["data"][0]["embeddings"]["dense"])


def test_a_model_is_loaded_replaced_and_loaded_again(client, folder, demo_checkpoint: Path) -> None:
    def state_after(command: str) -> str:
        answer = send_command(client, command)
        assert answer.status_code == 200, answer.text
        return answer.json()["state"]

    assert [state_after("load"), state_after("load")] == ["ready"] * 2
    before = dense(client)
    assert [state_after("unload"), state_after("unload")] == ["unloaded"] * 2
    shutil.rmtree(folder / "further")
    shutil.copytree(demo_checkpoint, folder / "further")
    assert state_after("load") == "ready"
    assert dense(client).shape != before.shape or not np.allclose(dense(client), before, atol=1e-3)
    models = {model["name"]: model for model in client.get("/health").json()["served_models"]}
    assert models["further"]["files_replaced"] == 1
    assert metric(client, "embedder_model_unloads_total", model="further") == 1


@pytest.mark.parametrize("command", ["load", "unload"])
def test_only_the_operator_may_send_commands_and_only_for_models_of_models(client, command) -> None:
    refused = send_command(client, command, SOMEBODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_operator")
    assert "operator" in refused.json()["error"]["message"]
    assert send_command(client, command, {"Authorization": ""}).status_code == 401
    default = client.get("/health").json()["served_models"][0]["name"]
    for name in (default, "nobodys"):
        answer = send_command(client, command, model=name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

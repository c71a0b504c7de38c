"""A model that cannot be had is one clear sentence, and every other model goes on.

Folder removed while it was unloaded, weights that are damaged, too little memory: sent 2 each,
refused 1 (503), answered 1 by the default model. A wrong line in MODELS: no start.
"""

import shutil
from pathlib import Path

import pytest

from tests.support.server import RunningServer, run_server, start_process

SENTENCES = {"sentences": ["bread"], "return_colbert": False}


@pytest.fixture(scope="module")
def broken(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server with a model that is there no more, and one whose weights are damaged."""
    folder = tmp_path_factory.mktemp("broken")
    gone, damaged = (shutil.copytree(tiny_m3, folder / name) for name in ("gone", "damaged"))
    (damaged / "model.safetensors").write_bytes(b"no weights")
    (folder / "models.yaml").write_text(f"- name: {gone}\n- name: {damaged}\n", "utf-8")
    with run_server(folder, EMBEDDING_MODEL=str(tiny_m3), MODELS="models.yaml") as server:
        server.wait_until_healthy()
        shutil.rmtree(gone)
        yield server
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gone", "the model folder "), ("damaged", "the weights in ")],
)
def test_a_model_that_cannot_be_loaded(broken: RunningServer, name: str, reason: str) -> None:
    with broken.client() as client:
        for _ in range(2):
            refused = client.post("/embeddings/", json=SENTENCES | {"model": name})
            body = refused.json()
            assert (refused.status_code, body["code"]) == (503, "model_not_loaded")
            assert body["detail"] == f"The model {name} could not be loaded; the log says why."
            assert 0 < int(refused.headers["Retry-After"]) <= 30
        assert client.post("/embeddings/", json=SENTENCES).status_code == 200
        health = client.get("/health")
        status = {each["name"]: each for each in health.json()["served_models"]}[name]
        assert (health.status_code, status["state"]) == (200, "failed")
        assert status["reason"] == body["detail"][0].lower() + body["detail"][1:-1]
    broken.wait_for_line(f"model={name} reason=")
    lines = [line for line in broken.lines if "model_load_failed" in line and name in line]
    assert len(lines) == 1
    assert reason in lines[0]
    assert broken.metric(f'model_loads_total{{model="{name}",result="failure"}}') == 1


def test_a_model_that_does_not_fit(tiny_m3: Path, tiny_qwen: Path, tmp_path: Path) -> None:
    """With a threshold that nothing meets, whatever the machine."""
    (tmp_path / "models.yaml").write_text(f"- name: {tiny_qwen}\n  load: start\n", "utf-8")
    settings = {"MODELS": "models.yaml", "MODEL_MEMORY_THRESHOLD": "0.000001"}
    with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3), **settings) as server:
        server.wait_until_healthy()
        with server.client() as client:
            refused = client.post("/v1/embeddings", json={"input": "a", "model": tiny_qwen.name})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "model_too_large"
            assert "can be had below MODEL_MEMORY_THRESHOLD=1e-06" in refused.text
            assert "Retry-After" not in refused.headers
            assert client.post("/embeddings/", json=SENTENCES).status_code == 200
        assert server.stop() == 0
    assert "model_load_failed" in server.log


def test_a_wrong_line_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("- name: a/b\n  laod: start\n", "utf-8")
    process = start_process(tmp_path, MODELS="models.yaml")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.strip() == (
        "Smart Embedder cannot start: models.yaml, line 2: laod is nothing that a model has: the "
        "nearest is load"
    )

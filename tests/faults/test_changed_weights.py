"""The files of two models are written over and cut short while the service runs.

Sent 16, answered 16, wrong 0: what is loaded is a copy.
"""

import os
import shutil
from pathlib import Path

import httpx2

from tests.support.server import RunningServer, run_server

TEXTS = [f"a text, number {number}" for number in range(8)]


def write_over(path: Path) -> None:
    """In place, with as many bytes."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    """As `cp new old` does at first."""
    os.truncate(path, 0)


def embed(server: RunningServer, client: httpx2.Client, text: str, model: str | None) -> object:
    answer = client.post("/embeddings/", json={"sentences": [text], "model": model})
    assert answer.status_code == 200, (answer.text, server.log)
    return answer.json()["data"]


def test_nobody_notices(tiny_m3: Path, tiny_qwen: Path, tmp_path: Path) -> None:
    names = {None: tmp_path / "m3", "other": tmp_path / "other"}
    sources = {None: tiny_m3, "other": tiny_qwen}
    for name, folder in names.items():
        shutil.copytree(sources[name], folder)
    (tmp_path / "models.yaml").write_text(f"- name: {names['other']}\n  load: start\n")
    settings = {"EMBEDDING_MODEL": str(names[None]), "MODELS": "models.yaml"}
    with run_server(tmp_path, **settings) as server, server.client() as client:
        expected = {
            (name, text): embed(server, client, text, name) for name in names for text in TEXTS
        }
        maps = Path(f"/proc/{server.process.pid}/maps").read_text("utf-8")
        assert not [line for line in maps.splitlines() if str(tmp_path) in line]
        changes = [write_over, cut]
        for number, text in enumerate(TEXTS):
            if number % 4 == 0:
                change = changes.pop(0)
                for folder in names.values():
                    change(folder / "model.safetensors")
            for name in names:
                assert embed(server, client, text, name) == expected[name, text]
        assert client.get("/health").status_code == 200
        assert server.stop() == 0

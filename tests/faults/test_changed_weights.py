"""The file that float32 weights are mapped from is written over while the service runs.

Replaced by renaming: sent 1, answered 1, wrong 0. Written over in place: unhealthy within seconds,
then sent 1, refused 1 (503 `unhealthy`), and the reason is told once in the log.
"""

import shutil
from pathlib import Path

from tests.faults.tally import GOOD
from tests.support.server import run_server


def test_weights_that_are_written_over_are_not_served(tiny_m3: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_m3, tmp_path / "m3")
    weights = model / "model.safetensors"
    settings = {"EMBEDDING_MODEL": str(model), "ATTENTION": "matmul"}
    with run_server(tmp_path, **settings) as server, server.client() as client:
        server.wait_until_healthy()
        before = client.post("/embeddings/", json=GOOD).json()["data"]
        mapped = tmp_path / "mapped"
        mapped.hardlink_to(weights)
        new = tmp_path / "new"
        new.write_bytes(bytes(weights.stat().st_size))
        new.rename(weights)
        assert client.post("/embeddings/", json=GOOD).json()["data"] == before
        with mapped.open("r+b") as file:
            file.seek(-1000, 2)
            file.write(bytes(1000))
        server.wait_for_status("/health/live", 503)
        health = client.get("/health").json()
        refused = client.post("/embeddings/", json=GOOD)
        assert (refused.status_code, refused.json()["code"]) == (503, "unhealthy")
        assert server.stop() == 0
    assert (health["status"], health["attention"]) == ("unhealthy", "matmul")
    assert health["reason"].startswith(
        "the file m3/model.safetensors was written to while the model read"
    )
    assert str(tmp_path) not in health["reason"]
    assert server.log.count("model_file_changed") == 1

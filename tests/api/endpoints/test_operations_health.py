"""/health shows the true state from the start of the process to its end."""

from pathlib import Path

import torch

from smart_embedder import __version__
from smart_embedder.models.ops.choose import choose_backend
from tests.support.server import RunningServer, run_server

FIELDS = [
    "version", "gpu", "model", "dense_embedding_model", "reranker_model", "max_input_length",
    "batch_size", "max_requests_in_batch", "max_batch_tokens", "dtype", "attention",
]  # fmt: skip
GPU_FIELDS = [
    "available", "device_info", "memory_gb", "device_count", "multi_gpu_enabled",
    "configured_devices",
    "failed_devices",
]  # fmt: skip


def test_a_warm_service_is_healthy_and_describes_itself(server: RunningServer, tiny_m3) -> None:
    with server.client() as client:
        response = client.get("/health")
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/ready").json() == response.json()
    health = response.json()
    assert (response.status_code, health["status"], health["reason"]) == (200, "healthy", None)
    assert set(FIELDS) <= set(health)
    assert set(health["gpu"]) == set(GPU_FIELDS)
    assert health["version"] == __version__
    assert health["model"] == health["dense_embedding_model"] == tiny_m3.name
    expected = choose_backend(torch.device("cpu"), torch.float32).fastest("attention")
    assert (health["dtype"], health["attention"]) == ("float32", expected)
    assert health["max_input_length"] == 8192
    assert health["max_batch_tokens"] >= 512
    assert health["batch_size"] == max(1, health["max_batch_tokens"] // 8192)
    assert health["gpu"]["available"] is False


def test_the_port_answers_while_the_model_is_loading(tiny_m3: Path, tmp_path: Path) -> None:
    """Asked as soon as the port is bound, /health says 503 "loading", and embedding is refused."""
    with run_server(tmp_path, EMBEDDING_MODEL=str(tiny_m3)) as server, server.client() as client:
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert health.json()["model"] == tiny_m3.name
        assert (health.json()["reason"], health.json()["download"]) == (
            "the models are being loaded",
            None,
        )
        assert client.get("/health/live").status_code == 200
        refused = client.post("/embeddings/", json={"sentences": ["a"]})
        assert (refused.status_code, refused.json()["code"]) == (503, "loading")
        assert int(refused.headers["retry-after"]) >= 1
        metrics = client.get("/metrics").text
        assert 'embedding_requests_rejected_total{reason="loading"} 1.0' in metrics
        server.wait_until_healthy()
        assert client.post("/embeddings/", json={"sentences": ["a"]}).status_code == 200
        assert server.stop() == 0
    assert server.log.count("Reranker ready. ") == 1
    assert server.log.count("Server ready to accept requests ") == 1
    assert str(tiny_m3.parent) not in server.log
    assert "server process" not in server.log  # uvicorn's own lines are at debug
    assert f"curl -s {server.url}/embeddings/" in server.log

"""/health, /metrics, /stats, /docs, and the index at /."""

import re
import sys
from itertools import product
from pathlib import Path
from urllib.parse import urljoin

import pytest
import torch
from httpx2 import ASGITransport, AsyncClient
from prometheus_client.parser import text_string_to_metric_families

from app.http_metrics import Metrics
from app.main import create_app
from app.middleware.request_metrics import MeasureRequests
from app.settings import Settings
from smart_embedder import __version__
from smart_embedder.kernels.target import choose_backend
from tests.app.conftest import serving
from tests.support.paths import EMBEDDING_ENDPOINTS, PATHS

FIELDS = [
    "version", "gpu", "model", "dense_embedding_model", "reranker_model", "max_input_length",
    "batch_size", "max_requests_in_batch", "max_batch_tokens", "dtype", "attention",
]  # fmt: skip
GPU_FIELDS = [
    "available", "device_info", "memory_gb", "device_count", "multi_gpu_enabled",
    "configured_devices", "failed_devices",
]  # fmt: skip


def series(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_every_series_of_requests_exists_at_zero_from_the_start() -> None:
    metrics = Metrics()
    MeasureRequests(None, metrics, PATHS.endpoints)  # type: ignore[arg-type]
    found = series(metrics.render().decode())
    counted = [name for name in found if name.endswith(("requests_total", "rejected_total"))]
    assert len(counted) == 7
    for name in (*counted, "embedding_request_duration_seconds_count"):
        assert found[name], name
        assert all(value == 0 for _, value in found[name]), name
    assert "embedding_server_info" in found
    statuses = {labels["status"] for labels, _ in found["embedding_requests_total"]}
    assert statuses == {"success", "client_error", "error", "timeout"}
    endpoints = {labels["endpoint"] for labels, _ in found["embedding_requests_total"]}
    assert endpoints == {*EMBEDDING_ENDPOINTS}
    reasons = {labels["reason"] for labels, _ in found["embedding_requests_rejected_total"]}
    assert {"backpressure", "rate_limit", "auth"} <= reasons
    if sys.platform == "linux":  # Other systems have no metrics of processes.
        ((_, used),) = found["process_resident_memory_bytes"]
        assert used > 0


def total(found, name: str, **labels: str) -> float:
    return sum(v for series_labels, v in found[name] if labels.items() <= series_labels.items())


def test_metrics_count_requests_and_stats_agree(tiny_m3: Path) -> None:
    with serving(embedding_model=str(tiny_m3), max_body_bytes=1_000_000) as client:
        for _ in range(3):
            client.post("/embeddings/", json={"sentences": ["a", "b"]})
        client.post("/embeddings", json={"sentences": []})
        client.post("/embeddings/", content=b"no json")
        large = b'["' + b"x" * 2_000_000
        client.post("/embeddings/", content=large, headers={"Content-Type": "application/json"})
        found = series(client.get("/metrics").text)
        client.app.state.service.metrics.started_at -= 3600 + 120
        stats = client.get("/stats").json()
    assert total(found, "embedding_requests_total", status="success") == 3
    assert total(found, "embedding_requests_total", status="client_error") == 2
    assert total(found, "embedding_requests_rejected_total", reason="body_too_large") == 1
    assert total(found, "embedding_sentences_processed_total") == 6
    for name in ("request_duration_seconds", "batch_size"):
        assert total(found, f"embedding_{name}_count") == 3
    assert total(found, "embedder_tokens_processed_total", model=tiny_m3.name) > 0
    assert total(found, "embedder_queue_wait_seconds_count") == 3
    (info,) = [labels for labels, _ in found["embedding_server_info"]]
    assert info["model"] == tiny_m3.name
    counts = {"total_requests": 5, "total_sentences": 6, "total_batches": 3, "rejected_requests": 1}
    assert counts.items() <= stats.items()
    assert re.fullmatch(r"1h 2m \ds", stats["uptime"])
    assert 3720 <= stats["uptime_seconds"] <= 3729
    assert stats["hardware"]["device_info"]


@pytest.mark.parametrize("page", ["/docs", "/redoc/"])
def test_docs_pages_load_all_files_from_this_server(client, page: str) -> None:
    html = client.get(page).text
    addresses = re.findall(r"""(?:src|href)=["']([^"']+)["']""", html)
    assert addresses
    for address in addresses:
        # Relative, so that a proxy can serve it below any path.
        assert not address.startswith("/"), address
        assert client.get(urljoin(page, address)).status_code == 200, address
    assert "https://" not in html


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
ACCEPTED = {
    "text/html": True, BROWSER: True, "text/html;q=0.9, application/json;q=0.8": True,
    "text/html;q=0": False, "text/html, application/json": False, "*/*": False, "": False,
}  # fmt: skip


@pytest.mark.parametrize("ui", [True, False])
async def test_the_index_redirects_browsers_to_the_page_if_ui_is_on(ui: bool) -> None:
    app = create_app(Settings(api_token=None, ui=ui, trusted_proxies="192.0.2.1"))
    transport = ASGITransport(app, client=("192.0.2.1", 1))
    async with AsyncClient(transport=transport, base_url="http://service") as client:
        for (accepted, is_browser), prefix in product(ACCEPTED.items(), ("", "/below")):
            headers = {"Accept": accepted} | ({"X-Forwarded-Prefix": prefix} if prefix else {})
            answer = await client.get("/", headers=headers)
            assert answer.headers["vary"] == "Accept"
            if ui and is_browser:
                assert answer.status_code == 303
                assert answer.headers["location"] == (f"{prefix}/ui" if prefix else "ui")
                continue
            assert answer.status_code == 200
            paths = answer.json()["paths"]
            assert paths["rerank"] == f"{prefix}/rerank"
            assert paths.get("page") == (f"{prefix}/ui" if ui else None)


async def test_metrics_show_a_tokens_file_that_cannot_be_read(tmp_path: Path) -> None:
    """The file is read for /metrics, too, even if no client sends a token."""
    file = tmp_path / "tokens"
    file.write_text("alice:one\n")
    app = create_app(Settings(api_token=None, api_tokens_file=file))
    async with AsyncClient(transport=ASGITransport(app), base_url="http://service") as client:

        async def shown() -> str:
            text = (await client.get("/metrics")).text
            return re.findall(r"^embedder_tokens_file_unreadable (\S+)$", text, re.MULTILINE)[0]

        assert await shown() == "0.0"
        file.rename(tmp_path / "away")
        assert await shown() == "1.0"
        file.write_text("no name and no token\n")
        assert await shown() == "1.0"
        (tmp_path / "away").replace(file)
        assert await shown() == "0.0"


def test_health_of_a_warm_service_is_200_with_a_description(client, tiny_m3) -> None:
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
    assert health["max_input_length"] == 2048
    assert health["max_batch_tokens"] >= 512
    assert health["batch_size"] == max(1, health["max_batch_tokens"] // 2048)
    assert health["gpu"]["available"] is False

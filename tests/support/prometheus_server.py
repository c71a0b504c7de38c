"""Runs a real Prometheus on a free loopback port."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.support.server import free_port

PROGRAM = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
WAIT_LIMIT = 500.0

needs_prometheus = pytest.mark.skipif(
    PROGRAM is None or PROMTOOL is None,
    reason="prometheus is not installed (apt-get install prometheus)",
)


class PrometheusServer:
    """A running Prometheus, and its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        response = httpx2.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=WAIT_LIMIT)
        answer = response.json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return the current samples of an expression: labels and values."""
        data = self.get("query", query=expression)
        assert data["resultType"] == "vector", data
        return [(sample["metric"], float(sample["value"][1])) for sample in data["result"]]


def _configuration(folder: Path, target: str) -> Path:
    """Write the deployed configuration with another target, scraped every second."""
    configuration = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(DEPLOYED / name) for name in configuration["rule_files"]]
    (job,) = configuration["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    return file


@contextmanager
def run_prometheus(folder: Path, target: str) -> Iterator[PrometheusServer]:
    """Start a Prometheus that scrapes `target`; end it when the block ends."""
    assert PROGRAM is not None
    address = f"127.0.0.1:{free_port()}"
    options = [
        f"--config.file={_configuration(folder, target)}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    process = subprocess.Popen([PROGRAM, *options], stderr=subprocess.PIPE, text=True)
    try:
        _wait_until_ready(process)
        yield PrometheusServer(f"http://{address}")
    finally:
        process.terminate()
        process.wait(WAIT_LIMIT)
        assert process.stderr is not None
        process.stderr.close()


def _wait_until_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stderr is not None
    log = ""
    for line in process.stderr:
        log += line
        if "Server is ready to receive web requests" in line:
            return
    raise AssertionError(log)

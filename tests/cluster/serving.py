"""The service as docs/clusters.md starts it, on the tests' cluster."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import yaml

from tests.cluster.ray_cluster import RayCluster, wait_until
from tests.support.server import REPOSITORY


def ask(client: httpx2.Client, request: str = "one") -> int:
    body = {"sentences": [f"text of {request}"], "return_colbert": False}
    try:
        return client.post("/embeddings/", json=body, headers={"X-Request-ID": request}).status_code
    except httpx2.TransportError:
        return 0


@contextmanager
def serving(cluster: RayCluster, model: Path, **settings: str) -> Iterator[str]:
    """Start it with smaller numbers; its address."""
    config = yaml.safe_load((REPOSITORY / "deploy" / "ray" / "service.yaml").read_text())
    port = config["http_options"]["port"] = cluster.http_port
    (application,) = config["applications"]
    own = {"EMBEDDING_MODEL": str(model), "RERANKER_MODEL": "none", "DEVICE": "cpu"}
    limits = {"RATE_LIMIT_REQUESTS_PER_MINUTE": "1000000", "RATE_LIMIT_BURST_SIZE": "1000000"}
    application["runtime_env"]["env_vars"] |= own | limits | settings
    (deployment,) = application["deployments"]
    deployment["ray_actor_options"] = {"num_cpus": 1}
    deployment["autoscaling_config"] |= {
        "max_replicas": 3,
        "target_ongoing_requests": 4,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 5,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
    }
    deployment |= {"health_check_period_s": 1, "health_check_timeout_s": 2}
    deployment["graceful_shutdown_timeout_s"] = 15
    file = cluster.folder / "service.yaml"
    file.write_text(yaml.safe_dump(config))
    process = cluster.start("serve", "run", "--address", cluster.address, str(file))
    url = f"http://127.0.0.1:{port}"
    log = cluster.folder / "serve.log"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx2.get(f"{url}/health").status_code == 200
        except httpx2.TransportError:
            return False

    try:
        wait_until(is_ready, "healthy")
        wait_until(lambda: len(cluster.replicas()) >= 2, "two replicas")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
        wait_until(lambda: not cluster.replicas(), "no replica is left")

"""A real Ray cluster on loopback, in the environment of scripts/check_cluster.sh.

On it the example of Ray Serve.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import psutil
import yaml

from tests.support.server import REPOSITORY, free_port
from tests.support.waiting import wait_until

BIN = REPOSITORY / ".venv-cluster" / "bin"
# Ray replaces 127.0.0.1 by the machine's public address.
NODE = "127.0.0.2"
LIMIT = 600.0
_REPLICA = "ray::ServeReplica:smart-embedder:SmartEmbedder"
_WORKER = "ray::MapWorker(MapBatches(BlockEmbedder))"


class RayCluster:
    """A head node; everything on it runs in child processes."""

    def __init__(self, process: "subprocess.Popen[bytes]", address: str, folder: Path) -> None:
        self.address = address
        self.folder = folder
        self.http_port = free_port()
        self._head = psutil.Process(process.pid)

    def processes(self, title: str) -> dict[int, psutil.Process]:
        """Return the processes whose title begins with this, by id."""
        found = {}
        for process in self._head.children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if " ".join(process.cmdline()).startswith(title):
                    found[process.pid] = process
        return found

    def replicas(self) -> dict[int, psutil.Process]:
        return self.processes(_REPLICA)

    def embedders(self) -> dict[int, psutil.Process]:
        return self.processes(_WORKER)

    def read_log(self, pid: int) -> str:
        """Return the log of a worker."""
        files = self.folder.glob(f"session_*/logs/worker-*-{pid}.*")
        return "".join(file.read_text("utf-8", "replace") for file in files)

    def start(self, program: str, *arguments: str, **settings: str) -> "subprocess.Popen[str]":
        """Start a program of the environment in the repository; its output goes to a file."""
        with (self.folder / f"{Path(program).name}.log").open("w") as output:
            return subprocess.Popen(
                [BIN / program, *arguments],
                cwd=REPOSITORY,
                env=environment(**settings),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )


def environment(**settings: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k in {"HOME", "LANG", "TMPDIR"}}
    defaults = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0"}
    path = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    return inherited | defaults | path | settings


@contextmanager
def run_cluster(folder: Path) -> Iterator[RayCluster]:
    """Run a cluster with six logical CPUs for the length of the block."""
    port = free_port()
    options = [f"--node-ip-address={NODE}", f"--port={port}", "--num-cpus=6", "--block"]
    options += ["--object-store-memory=200000000", "--include-dashboard=false"]
    log = folder / "head.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [BIN / "ray", "start", "--head", *options, f"--temp-dir={folder}"],
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    cluster = RayCluster(process, f"{NODE}:{port}", folder)
    try:
        wait_until(
            lambda: "runtime started" in log.read_text() or process.poll() is not None, "started"
        )
        assert process.poll() is None, log.read_text()
        yield cluster
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process and its children."""
    head = psutil.Process(process.pid)
    family = [*head.children(recursive=True)]
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    _, alive = psutil.wait_procs([*family, head], timeout=5)
    for survivor in alive:
        with suppress(psutil.NoSuchProcess):
            survivor.kill()
    process.wait(30)


def ask(client: httpx2.Client, request: str = "one") -> int:
    body = {"sentences": [f"text of {request}"], "return_colbert": False}
    try:
        return client.post("/embeddings/", json=body, headers={"X-Request-ID": request}).status_code
    except httpx2.TransportError:
        return 0


@contextmanager
def serving(cluster: RayCluster, model: Path) -> Iterator[str]:
    """Start the example on a CPU for each replica, and yield its address."""
    port = cluster.http_port
    settings = {"EMBEDDING_MODEL": str(model), "RERANKER_MODEL": "none", "DEVICE": "cpu"}
    options = {"num_cpus": 1, "runtime_env": {"env_vars": {"LOG_FORMAT": "json"} | settings}}
    application = {
        "name": "smart-embedder",
        "import_path": "deploy.ray.serve:app",
        "deployments": [{"name": "SmartEmbedder", "ray_actor_options": options}],
    }
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }
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

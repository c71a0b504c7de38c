"""Properties of the Dockerfiles; scripts/check_images.sh builds and runs an image."""

import json
import re
import shutil
import socket
import subprocess
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.answering_http import Handler, serving

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("cpu", "gpu")


def stages(device: str = "cpu") -> dict[str, list[str]]:
    """The instructions of each stage, each on one line, without comments; "" is before all."""
    text = (ROOT / f"Dockerfile.{device}").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: dict[str, list[str]] = {}
    stage = ""
    for line in filter(None, joined.splitlines()):
        stage = line.rpartition(" AS ")[2] if line.startswith("FROM ") else stage
        found.setdefault(stage, []).append(line)
    return found


def service(pattern: str) -> int:
    """Return the index of the only matching instruction in the service's stage."""
    (found,) = [i for i, line in enumerate(stages()["service"]) if re.search(pattern, line)]
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_hadolint_finds_nothing(device: str) -> None:
    file = ROOT / f"Dockerfile.{device}"
    done = subprocess.run(["hadolint", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_dockerfiles_differ_only_in_pytorch_and_gpu_variables() -> None:
    cpu, gpu = map(stages, DEVICES)
    assert cpu.keys() == gpu.keys()
    different = [
        (on_cpu, on_gpu)
        for stage in cpu
        for on_cpu, on_gpu in zip(cpu[stage], gpu[stage], strict=True)
        if on_cpu != on_gpu
    ]
    torch, variables = different
    assert torch[0].replace("torch-cpu.lock", "torch-gpu.lock") == torch[1]
    assert variables[1].startswith(variables[0])
    added = variables[1].removeprefix(variables[0]).split()
    assert {name.partition("=")[0] for name in added} == {
        "PYTORCH_CUDA_ALLOC_CONF",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
    }


def test_base_image_has_a_digest_and_packages_have_hashes() -> None:
    base = r"ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}"
    (argument,) = stages()[""]
    assert re.fullmatch(base, argument)
    bases = {stage: lines[0].split()[1] for stage, lines in stages().items() if stage}
    assert bases.pop("tools") == bases.pop("service") == "${PYTHON_IMAGE}"
    assert set(bases.values()) == {"tools", "service"}
    every = [line for lines in stages().values() for line in lines]
    installing = [line for line in every if re.search(r"/bin/pip .*install ", line)]
    assert len(installing) == 4
    assert all("--no-deps --require-hashes -r /" in line for line in installing)
    # No image has pip or a compiler.
    assert "venv --without-pip /venv" in "\n".join(stages()["service"])
    assert "apt-get" not in "\n".join(every)


def test_service_runs_as_user_1000_and_owns_only_the_model_cache() -> None:
    user = service("^USER ")
    assert stages()["service"][user] == "USER 1000:1000"
    assert service("install --directory --owner=1000 --group=1000 /app/model_cache") < user


class AnsweringHealth(Handler):
    """Answers with the status of the server."""

    def respond(self) -> None:
        assert self.path == "/health"
        assert isinstance(self.server, HealthServer)
        self.answer(self.server.status)


class HealthServer(ThreadingHTTPServer):
    status = 200

    def __init__(self, host: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), AnsweringHealth)


@pytest.mark.parametrize(
    ("host", "listens_on"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("127.0.0.2", "127.0.0.2")]
)
def test_health_check_uses_the_address_of_the_service(host: str, listens_on: str) -> None:
    line = stages()["service"][service("^HEALTHCHECK ")]
    _, *arguments = json.loads(line.partition(" CMD ")[2])
    with serving(HealthServer(listens_on)) as server:
        environment = {
            "HOST": host,
            "PORT": str(server.server_port),
            "http_proxy": "http://proxy.invalid",
        }
        for server.status, healthy in ((200, True), (503, False)):
            done = subprocess.run(
                [sys.executable, *arguments], env=environment, capture_output=True, check=False
            )
            assert (done.returncode == 0) == healthy, done.stderr
            assert not done.stderr


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        ([], "-m app"),
        (["--port", "1 2"], "-m app --port 1 2"),
        (["python", "--version"], "--version"),
    ],
)
def test_entrypoint_passes_flags_and_runs_other_commands(
    words: list[str], ran: str, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text(f'#!{shutil.which("sh")}\necho "$$ $*"\n')
    (tmp_path / "python").chmod(0o755)
    command = json.loads(stages()["service"][service("^ENTRYPOINT ")].partition(" ")[2])
    started = subprocess.Popen(
        [*command, *words], env={"PATH": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )
    # The same process: a shell in between would not forward SIGTERM.
    assert started.communicate()[0] == f"{started.pid} {ran}\n"
    assert not any(line.startswith("CMD") for line in stages()["service"])

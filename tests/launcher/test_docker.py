"""The server in a container: what compose is told, and Docker that cannot be used."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.settings.sources import COMPOSE_VARIABLES
from launcher import docker
from launcher.console import LaunchError
from tests.launcher.checkout import (
    BARE,
    BASH,
    QWEN,
    add_docker,
    add_nvidia_smi,
    add_program,
    needs_bash,
    start,
)
from tests.support.disks import give_up_rights

pytestmark = needs_bash

HERE = {"Name": socket.gethostname()}
NO_TOOLKIT = (
    "start_server: docker gpu needs the NVIDIA Container Toolkit, and Docker does not have it: "
    "install nvidia-container-toolkit and restart Docker, or use 'start_server.sh docker cpu'.\n"
)
FORBIDDEN = (
    "start_server: you may not use Docker: 'sudo usermod -aG docker $USER' and a new login allow "
    "it, or run this with sudo.\n"
)


@pytest.mark.parametrize("python", [sys.executable, ""], ids=["python", "no python"])
@pytest.mark.parametrize(
    ("line", "nvidia_smi", "flavour"),
    [
        ("", None, "cpu"),
        ("", "exit 0", "gpu"),
        ("docker auto", "exit 9", "cpu"),
        ("docker CPU", "exit 0", "cpu"),
        ("gpu", None, "gpu"),
    ],
)
def test_docker_starts_the_compose_file_of_the_device_and_tells_where_its_logs_are(
    script: Path, tools: Path, line: str, nvidia_smi: str | None, flavour: str, python: str
) -> None:
    add_docker(tools)
    if nvidia_smi:
        add_program(tools, "nvidia-smi", nvidia_smi)
    result = start(*line.split(), script=script, PATH=str(tools), PYTHON=python)
    assert result.returncode == 0, result.stderr
    assert f"ran compose -f docker-compose.{flavour}.yml up --build -d |" in result.stdout
    assert (
        f'docker compose -f "{script.parent}/docker-compose.{flavour}.yml" logs -f' in result.stdout
    )
    assert ("http://127.0.0.1:9000/health" in result.stdout) == bool(python)


@pytest.mark.parametrize("python", [sys.executable, ""], ids=["python", "no python"])
def test_docker_that_cannot_start_is_an_error(script: Path, tools: Path, python: str) -> None:
    add_program(tools, "docker", "[[ $4 != up ]]")
    result = start(script=script, PATH=str(tools), PYTHON=python)
    assert result.returncode == 1
    assert result.stderr.startswith("start_server: docker compose could not start")


@pytest.mark.parametrize("python", [sys.executable, ""], ids=["python", "no python"])
@pytest.mark.parametrize(
    ("memory", "tuned"),
    [
        (r"24576\n8188\n", "8 8192"),
        (r"6144\n", "4 4096"),
        (r"24576\n", "16 8192"),
        (r"[N/A]\n", "unset unset"),
    ],
)
def test_a_container_gets_what_the_memory_of_the_gpu_calls_for(
    script: Path, tools: Path, memory: str, tuned: str, python: str
) -> None:
    add_docker(tools)
    add_nvidia_smi(tools, memory)
    result = start(script=script, PATH=str(tools), PYTHON=python, **QWEN)
    assert f"docker-compose.gpu.yml up --build -d | unset {QWEN['RERANKER_MODEL']} {tuned}\n" in (
        result.stdout
    )


def add_failing_docker(folder: Path, message: str) -> None:
    text = f'[[ $1 == compose ]] && echo 2.40.3 || {{ echo "{message}" >&2; exit 1; }}'
    add_program(folder, "docker", text)


@pytest.mark.parametrize("python", [sys.executable, ""], ids=["python", "no python"])
def test_the_limits_of_the_container_are_printed(script: Path, tools: Path, python: str) -> None:
    add_docker(tools)
    defaults = {each.name: each.default for each in COMPOSE_VARIABLES}
    assert {name: defaults[name] for name in docker.LIMITS} == docker.LIMITS
    variables = {"PATH": str(tools), "PYTHON": python, "MEMORY_LIMIT": "3g"}
    result = start("docker", "cpu", script=script, **variables)
    assert "Limits of the container: MEMORY_LIMIT=3g, PIDS_LIMIT=2048.\n" in result.stdout


@pytest.mark.parametrize("line", ["", "Docker GPU", "cpu"])
def test_without_docker_one_sentence_says_so(script: Path, tools: Path, line: str) -> None:
    result = start(*line.split(), script=script, PATH=str(tools))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: docker was not found")
    assert len(result.stderr.splitlines()) == 1


def test_without_the_compose_plugin_one_sentence_says_so(script: Path, tools: Path) -> None:
    add_program(tools, "docker", "exit 1")
    result = start(script=script, PATH=str(tools))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: 'docker compose' was not found")


@pytest.mark.parametrize("version", ["2.24.3", "v2.3.10", "2.0.0-rc.3"])
def test_a_compose_plugin_too_old_for_the_files_is_told(
    script: Path, tools: Path, version: str
) -> None:
    add_docker(tools, compose=version)
    result = start(script=script, PATH=str(tools))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"start_server: docker compose {version.removeprefix('v')} is too old: install 2.24.4 or "
        "newer.\n"
    )


@pytest.mark.parametrize("version", ["2.24.4", "v2.24.4", "2.40.3-desktop.1", "5.0.0", "dev"])
def test_a_compose_plugin_that_is_new_enough_is_used(
    script: Path, tools: Path, version: str
) -> None:
    add_docker(tools, compose=version)
    assert start(script=script, PATH=str(tools)).returncode == 0


def test_a_daemon_that_does_not_answer_is_told_with_its_own_words(
    script: Path, tools: Path
) -> None:
    words = "Cannot connect to the Docker daemon at unix:///a. Is the docker daemon running?"
    add_failing_docker(tools, f"Server:\n{words}")
    result = start(script=script, PATH=str(tools))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"start_server: the Docker daemon does not answer ({words}): start Docker Desktop, or on "
        "Linux 'sudo systemctl start docker'.\n"
    )


def test_a_daemon_that_is_silent_is_told(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not through a real start, which would be as patient as with a daemon that only just began."""
    (tools / "sleep").symlink_to(str(shutil.which("sleep")))
    add_program(tools, "docker", "[[ $1 == compose ]] && echo 2.40.3 || exec sleep 600")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(docker, "SECONDS_TO_ANSWER", 1)
    with pytest.raises(LaunchError, match="does not answer \\(no answer in 1 seconds\\): start"):
        docker.require_docker()


def test_a_daemon_that_the_user_may_not_use_is_told(script: Path, tools: Path) -> None:
    add_failing_docker(tools, "permission denied while trying to connect to the Docker daemon")
    assert start(script=script, PATH=str(tools)).stderr == FORBIDDEN


def test_without_the_nvidia_toolkit_docker_gpu_says_so(script: Path, tools: Path) -> None:
    add_docker(tools, Runtimes={"runc": {}}, **HERE)
    result = start("docker", "gpu", script=script, PATH=str(tools))
    assert (result.returncode, result.stdout, result.stderr) == (1, "", NO_TOOLKIT)
    add_program(tools, "nvidia-smi", "exit 0")
    assert start("docker", "auto", script=script, PATH=str(tools)).stderr == NO_TOOLKIT
    assert start("docker", "cpu", script=script, PATH=str(tools)).returncode == 0


@pytest.mark.parametrize(
    "facts",
    [
        HERE | {"Runtimes": {"runc": {}, "nvidia": {}}},
        HERE | {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]},
        {"Name": "docker-desktop", "Runtimes": {"runc": {}}},
        {"Name": "another-machine"},
    ],
    ids=["runtime", "device", "desktop", "elsewhere"],
)
def test_a_daemon_that_may_have_the_toolkit_is_not_refused(
    script: Path, tools: Path, facts
) -> None:
    add_docker(tools, **facts)
    assert start("docker", "gpu", script=script, PATH=str(tools)).returncode == 0


def test_the_toolkits_hook_is_enough_without_a_runtime_of_its_own(
    script: Path, tools: Path
) -> None:
    add_docker(tools, **HERE)
    add_program(tools, "nvidia-container-runtime-hook", "exit 0")
    assert start("docker", "gpu", script=script, PATH=str(tools)).returncode == 0


@pytest.fixture
def real_docker(tools: Path, tmp_path: Path) -> dict[str, str]:
    """Docker's own command, a stand-in for its plugin, and no daemon; skips without it."""
    program = shutil.which("docker")
    if program is None:
        pytest.skip("docker is not installed")
    (tools / "docker").symlink_to(program)
    plugins = tmp_path / "docker" / "cli-plugins"
    plugins.mkdir(parents=True)
    about = '{"SchemaVersion": "0.1.0", "Vendor": "Docker Inc.", "Version": "2.40.3"}'
    text = f"[[ $1 == docker-cli-plugin-metadata ]] && echo '{about}' || echo 2.40.3"
    add_program(plugins, "docker-compose", text)
    return {
        "PATH": str(tools),
        "DOCKER_CONFIG": str(tmp_path / "docker"),
        "DOCKER_HOST": f"unix://{tmp_path / 'docker.sock'}",
    }


def test_the_real_docker_without_its_daemon_is_told(
    script: Path, real_docker: dict[str, str]
) -> None:
    result = start(script=script, **real_docker)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: the Docker daemon does not answer (")
    assert real_docker["DOCKER_HOST"] in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_real_docker_with_a_daemon_that_is_forbidden_is_told(
    script: Path, real_docker: dict[str, str], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as daemon:
        path = Path(real_docker["DOCKER_HOST"].removeprefix("unix://"))
        daemon.bind(str(path))
        daemon.listen()
        path.chmod(0o600)
        without_rights = give_up_rights(path)
        result = subprocess.run(
            [*without_rights, str(BASH), str(script)],
            env=BARE | real_docker,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (result.returncode, result.stdout, result.stderr) == (1, "", FORBIDDEN)

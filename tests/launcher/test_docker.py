"""The server in a container: what compose is told, and Docker that cannot be used."""

import shutil
import socket
import sys
from pathlib import Path

import pytest

from launcher.console import LaunchError
from launcher.docker import LIMITS, require_docker
from smart_embedder.settings.sources import COMPOSE_VARIABLES
from tests.launcher.checkout import (
    BASH,
    QWEN,
    add_docker,
    add_nvidia_smi,
    add_program,
    docker,
    needs_bash,
    refused,
    run,
    sentence_of,
    start,
)
from tests.support.disks import give_up_rights

pytestmark = needs_bash

HERE = {"Name": socket.gethostname()}
NO_TOOLKIT = (
    "docker gpu needs the NVIDIA Container Toolkit, and Docker does not have it: "
    "install nvidia-container-toolkit and restart Docker, or use 'start_server.sh docker cpu'."
)
FORBIDDEN = (
    "you may not use Docker: 'sudo usermod -aG docker $USER' and a new login allow "
    "it, or run this with sudo."
)
NOT_FOUND = "docker was not found"
WORDS = "Cannot connect to the Docker daemon at unix:///a. Is the docker daemon running?"
with_and_without_python = pytest.mark.parametrize(
    "python", [sys.executable, ""], ids=["python", "no python"]
)


@with_and_without_python
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


@with_and_without_python
def test_docker_that_cannot_start_is_an_error(script: Path, tools: Path, python: str) -> None:
    add_program(tools, "docker", "[[ $4 != up ]]")
    result = start(script=script, PATH=str(tools), PYTHON=python)
    assert result.returncode == 1
    assert result.stderr.startswith("start_server: docker compose could not start")


@with_and_without_python
@pytest.mark.parametrize(
    ("memory", "tuned"),
    [
        (r"24576\n8188\n", "8 8192"),
        (r"6144\n", "4 4096"),
        (r"24576\n", "16 8192"),
        (r"[N/A]\n", "unset unset"),
    ],
)
def test_a_container_gets_what_the_memory_of_the_gpu_calls_for_and_its_limits_are_told(
    script: Path, tools: Path, memory: str, tuned: str, python: str
) -> None:
    add_docker(tools)
    add_nvidia_smi(tools, memory)
    variables = QWEN | {"PATH": str(tools), "PYTHON": python, "MEMORY_LIMIT": "3g"}
    told = start(script=script, **variables).stdout
    reranker = QWEN["RERANKER_MODEL"]
    assert f"docker-compose.gpu.yml up --build -d | unset {reranker} {tuned}\n" in told
    assert "Limits of the container: MEMORY_LIMIT=3g, PIDS_LIMIT=2048.\n" in told


def test_the_limits_of_the_container_are_those_of_the_compose_files() -> None:
    defaults = {each.name: each.default for each in COMPOSE_VARIABLES}
    assert {name: defaults[name] for name in LIMITS} == LIMITS


def failing(message: str) -> str:
    """A docker whose daemon cannot be asked."""
    return f'[[ $1 == compose ]] && echo 2.40.3 || {{ echo "{message}" >&2; exit 1; }}'


@pytest.mark.parametrize(
    ("line", "program", "sentence"),
    [
        ("", None, NOT_FOUND),
        ("Docker GPU", None, NOT_FOUND),
        ("cpu", None, NOT_FOUND),
        ("", "exit 1", "'docker compose' was not found: "),
        ("", docker("2.24.3"), "docker compose 2.24.3 is too old: install 2.24.4 or newer."),
        ("", docker("v2.3.10"), "docker compose 2.3.10 is too old: "),
        ("", docker("2.0.0-rc.3"), "docker compose 2.0.0-rc.3 is too old: "),
        ("", failing(f"Server:\n{WORDS}"), f"the Docker daemon does not answer ({WORDS}): start "),
        ("", failing("permission denied while trying to connect to the daemon"), FORBIDDEN),
        ("docker gpu", docker(Runtimes={"runc": {}}, **HERE), NO_TOOLKIT),
    ],
)
def test_docker_that_cannot_be_used_is_one_sentence(
    script: Path, tools: Path, line: str, program: str | None, sentence: str
) -> None:
    if program is not None:
        add_program(tools, "docker", program)
    assert refused(*line.split(), script=script, PATH=str(tools)).startswith(sentence)


def test_a_daemon_that_is_silent_is_told(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not through a real start, which would be as patient as with a daemon that only just began."""
    (tools / "sleep").symlink_to(str(shutil.which("sleep")))
    add_program(tools, "docker", "[[ $1 == compose ]] && echo 2.40.3 || exec sleep 600")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr("launcher.docker.SECONDS_TO_ANSWER", 1)
    with pytest.raises(LaunchError, match="does not answer \\(no answer in 1 seconds\\): start"):
        require_docker()


def test_auto_needs_the_nvidia_toolkit_where_there_is_a_gpu(script: Path, tools: Path) -> None:
    add_docker(tools, Runtimes={"runc": {}}, **HERE)
    add_program(tools, "nvidia-smi", "exit 0")
    assert refused("docker", "auto", script=script, PATH=str(tools)) == NO_TOOLKIT
    assert start("docker", "cpu", script=script, PATH=str(tools)).returncode == 0
    # The toolkit's hook is enough, without a runtime of its own.
    add_program(tools, "nvidia-container-runtime-hook", "exit 0")
    assert start("docker", "gpu", script=script, PATH=str(tools)).returncode == 0


@pytest.mark.parametrize(
    ("line", "known"),
    [
        *(("", {"compose": each}) for each in ("2.24.4", "v2.24.4", "2.40.3-desktop.1", "5.0.0")),
        ("", {"compose": "dev"}),
        ("docker gpu", HERE | {"Runtimes": {"runc": {}, "nvidia": {}}}),
        (
            "docker gpu",
            HERE | {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]},
        ),
        ("docker gpu", {"Name": "docker-desktop", "Runtimes": {"runc": {}}}),
        ("docker gpu", {"Name": "another-machine"}),
    ],
)
def test_docker_that_is_new_enough_and_may_have_the_toolkit_is_used(
    script: Path, tools: Path, line: str, known: dict[str, object]
) -> None:
    add_docker(tools, **known)
    assert start(*line.split(), script=script, PATH=str(tools)).returncode == 0


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


def test_the_real_docker_whose_daemon_is_not_there_or_forbidden_is_told(
    script: Path, real_docker: dict[str, str]
) -> None:
    sentence = refused(script=script, **real_docker)
    assert sentence.startswith("the Docker daemon does not answer (")
    assert real_docker["DOCKER_HOST"] in sentence
    with socket.socket(socket.AF_UNIX) as daemon:
        path = Path(real_docker["DOCKER_HOST"].removeprefix("unix://"))
        daemon.bind(str(path))
        daemon.listen()
        path.chmod(0o600)
        command = [*give_up_rights(path), str(BASH), str(script)]
        assert sentence_of(run(command, **real_docker)) == FORBIDDEN

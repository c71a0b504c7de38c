"""The server in a container: what compose is told, and Docker that cannot be used."""

import shutil
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from launcher.console import LaunchError
from launcher.docker import LIMITS, require_container, require_docker
from smart_embedder.settings.sources import COMPOSE_VARIABLES
from tests.launcher.checkout import FLAVOURS, MEMORIES, QWEN, Checkout, add_program, docker
from tests.support.disks import give_up_rights

HERE = {"Name": socket.gethostname()}
FORBIDDEN = (
    "you may not use Docker: 'sudo usermod -aG docker $USER' and a new login allow "
    "it, or run this with sudo."
)
WORDS = "Cannot connect to the Docker daemon at unix:///a. Is the docker daemon running?"
with_and_without_python = pytest.mark.parametrize(
    "python", [sys.executable, ""], ids=["python", "no python"]
)


@with_and_without_python
@pytest.mark.parametrize(("line", "nvidia_smi", "flavour"), FLAVOURS)
def test_docker_starts_the_compose_file_of_the_device_and_tells_where_its_logs_are(
    checkout: Checkout, line: str, nvidia_smi: int | None, flavour: str, python: str
) -> None:
    add_program(checkout.tools, "docker", docker())
    if nvidia_smi is not None:
        add_program(checkout.tools, "nvidia-smi", f"exit {nvidia_smi}")
    result = checkout.start(line, PYTHON=python)
    assert result.returncode == 0, result.stderr
    file = f"docker-compose.{flavour}.yml"
    assert f"ran compose -f {file} up --build -d |" in result.stdout
    assert f'docker compose -f "{checkout.folder}/{file}" logs -f' in result.stdout
    assert ("http://127.0.0.1:9000/health" in result.stdout) == bool(python)


@with_and_without_python
def test_docker_that_cannot_start_is_an_error(checkout: Checkout, python: str) -> None:
    add_program(checkout.tools, "docker", "[[ $4 != up ]]")
    result = checkout.start(PYTHON=python)
    assert result.returncode == 1
    assert result.stderr.startswith("start_server: docker compose could not start")


@with_and_without_python
@pytest.mark.parametrize(("report", "tuned"), MEMORIES)
def test_a_container_gets_what_the_memory_of_the_gpu_calls_for_and_its_limits_are_told(
    checkout: Checkout, report: tuple[str, ...], tuned: str, python: str
) -> None:
    add_program(checkout.tools, "docker", docker())
    answer = "; ".join(f"echo '{line}'" for line in report)
    asked = f"if [[ $1 == --query-gpu=memory.total ]]; then {answer}; fi"
    add_program(checkout.tools, "nvidia-smi", asked)
    shown = checkout.start(PYTHON=python, MEMORY_LIMIT="3g", **QWEN).stdout
    expected = f"unset {QWEN['RERANKER_MODEL']} {tuned or 'unset unset'}\n"
    assert f"docker-compose.gpu.yml up --build -d | {expected}" in shown
    assert "Limits of the container: MEMORY_LIMIT=3g, PIDS_LIMIT=2048.\n" in shown


def test_the_limits_of_the_container_are_those_of_the_compose_files() -> None:
    defaults = {each.name: each.default for each in COMPOSE_VARIABLES}
    assert {name: defaults[name] for name in LIMITS} == LIMITS


def failing(message: str) -> str:
    """A docker whose daemon cannot be asked."""
    return f'[[ $1 == compose ]] && echo 2.40.3 || {{ echo "{message}" >&2; exit 1; }}'


CDI = [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]


@pytest.mark.parametrize(
    ("flavour", "program", "sentence"),
    [
        ("cpu", None, "docker was not found: install Docker, or use 'start_server.sh local'."),
        ("cpu", "exit 1", "'docker compose' was not found: "),
        ("cpu", docker("2.24.3"), "docker compose 2.24.3 is too old: install 2.24.4 or newer."),
        ("cpu", docker("v2.3.10"), "docker compose 2.3.10 is too old: "),
        ("cpu", docker("2.0.0-rc.3"), "docker compose 2.0.0-rc.3 is too old: "),
        *(("cpu", docker(each), None) for each in ("2.24.4", "v2.24.4", "5.0.0", "dev")),
        ("cpu", docker("2.40.3-desktop.1"), None),
        ("cpu", failing(f"Server:\n{WORDS}"), f"the Docker daemon does not answer ({WORDS}): "),
        ("cpu", failing("permission denied while trying to connect"), FORBIDDEN),
        ("cpu", docker(Runtimes={"runc": {}}, **HERE), None),
        ("gpu", docker(Runtimes={"runc": {}}, **HERE), "docker gpu needs the NVIDIA Container Too"),
        ("gpu", docker(Runtimes={"runc": {}, "nvidia": {}}, **HERE), None),
        ("gpu", docker(DiscoveredDevices=CDI, **HERE), None),
        ("gpu", docker(Name="docker-desktop", Runtimes={"runc": {}}), None),
        ("gpu", docker(Name="another-machine"), None),
    ],
)
def test_docker_that_cannot_be_used_is_one_sentence(
    tools: Path, monkeypatch, flavour: str, program: str | None, sentence: str | None
) -> None:
    if program is not None:
        add_program(tools, "docker", program)
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(LaunchError) if sentence else nullcontext() as refused:
        require_container(flavour, {"PORT": "0"})
    assert not sentence or str(refused.value).startswith(sentence)


def test_the_nvidia_toolkits_hook_is_enough_without_a_runtime_of_its_own(
    tools: Path, monkeypatch
) -> None:
    add_program(tools, "docker", docker(Runtimes={"runc": {}}, **HERE))
    add_program(tools, "nvidia-container-runtime-hook", "exit 0")
    monkeypatch.setenv("PATH", str(tools))
    require_container("gpu", {"PORT": "0"})


def test_a_daemon_that_is_silent_is_told(tools: Path, monkeypatch) -> None:
    (tools / "sleep").symlink_to(str(shutil.which("sleep")))
    add_program(tools, "docker", "[[ $1 == compose ]] && echo 2.40.3 || exec sleep 600")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr("launcher.docker.SECONDS_TO_ANSWER", 1)
    with pytest.raises(LaunchError, match="does not answer \\(no answer in 1 seconds\\): start"):
        require_docker()


def test_the_real_docker_whose_daemon_is_not_there_or_forbidden_is_told(
    checkout: Checkout, tmp_path: Path
) -> None:
    """With a stand-in for its plugin."""
    program = shutil.which("docker")
    if program is None:
        pytest.skip("docker is not installed")
    (checkout.tools / "docker").symlink_to(program)
    plugins, address = tmp_path / "docker" / "cli-plugins", tmp_path / "docker.sock"
    plugins.mkdir(parents=True)
    about = '{"SchemaVersion": "0.1.0", "Vendor": "Docker Inc.", "Version": "2.40.3"}'
    text = f"[[ $1 == docker-cli-plugin-metadata ]] && echo '{about}' || echo 2.40.3"
    add_program(plugins, "docker-compose", text)
    real = {"DOCKER_CONFIG": str(tmp_path / "docker"), "DOCKER_HOST": f"unix://{address}"}
    sentence = checkout.refusal(**real)
    assert sentence.startswith("the Docker daemon does not answer (")
    assert real["DOCKER_HOST"] in sentence
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(address))
        daemon.listen()
        address.chmod(0o600)
        assert checkout.refusal(prefix=give_up_rights(address), **real) == FORBIDDEN

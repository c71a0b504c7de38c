"""The server in a container: the arguments of compose, and errors of Docker."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.checkout import FLAVOURS, MEMORIES, QWEN, Checkout, add_program, docker

HERE = {"Name": socket.gethostname()}


@pytest.mark.parametrize(("line", "nvidia_smi", "flavour"), FLAVOURS)
def test_docker_starts_the_compose_file_of_the_device_and_prints_the_logs_command(
    checkout: Checkout, line: str, nvidia_smi: int | None, flavour: str
) -> None:
    add_program(checkout.tools, "docker", docker())
    if nvidia_smi is not None:
        add_program(checkout.tools, "nvidia-smi", f"exit {nvidia_smi}")
    result = checkout.start(line)
    assert result.returncode == 0, result.stderr
    file = f"docker-compose.{flavour}.yml"
    assert f"ran compose -f {file} up --build -d |" in result.stdout
    assert f'docker compose -f "{checkout.folder}/{file}" logs -f' in result.stdout
    assert "http://127.0.0.1:9000/health" in result.stdout


@pytest.mark.parametrize(
    ("line", "device", "file", "expected"),
    [
        ("docker", "cuda:1", "gpu", "cuda:1"),
        ("docker", "cpu", "cpu", "cpu"),
        ("docker gpu", "cuda:1", "gpu", "cuda:1"),
        ("docker gpu", "cpu", "gpu", "cuda"),
        ("docker cpu", "cuda", "cpu", "cuda"),
    ],
)
def test_the_argument_decides_on_the_device_and_auto_follows_the_setting(
    checkout: Checkout, line: str, device: str, file: str, expected: str
) -> None:
    """The compose file for CPUs does not pass DEVICE to the service."""
    add_program(checkout.tools, "docker", docker())
    add_program(checkout.tools, "nvidia-smi", "exit 0")
    shown = checkout.start(line, DEVICE=device).stdout
    assert f"docker-compose.{file}.yml up --build -d | {expected} " in shown
    assert ("Set for this start: DEVICE=cuda." in shown) == (device == "cpu" and file == "gpu")


def test_docker_that_cannot_start_is_an_error(checkout: Checkout) -> None:
    add_program(checkout.tools, "docker", "[[ $4 != up ]]")
    result = checkout.start()
    assert result.returncode == 1
    assert result.stderr.startswith("start_server: docker compose could not start")


@pytest.mark.parametrize(("report", "tuned"), MEMORIES)
def test_a_container_gets_the_reranker_limits_of_the_gpu_memory(
    checkout: Checkout, report: tuple[str, ...], tuned: str
) -> None:
    add_program(checkout.tools, "docker", docker())
    answer = "; ".join(f"echo '{line}'" for line in report)
    script = f"if [[ $1 == --query-gpu=memory.total ]]; then {answer}; fi"
    add_program(checkout.tools, "nvidia-smi", script)
    shown = checkout.start(**QWEN).stdout
    expected = f"unset unset {QWEN['RERANKER_MODEL']} {tuned or 'unset unset'}\n"
    assert f"docker-compose.gpu.yml up --build -d | {expected}" in shown


@pytest.mark.parametrize(
    ("dotenv", "tuned"),
    [
        ("\ufeffRERANKER_MODEL=${MINE:-/models/my-QWEN3}\n", "1 2048"),
        ("export RERANKER_MODEL='my/QWEN'  # mine\nQWEN_RERANK_BATCH_SIZE=3", "unset 2048"),
    ],
)
def test_env_files_are_read_by_compose(
    checkout: Checkout, tmp_path: Path, dotenv: str, tuned: str
) -> None:
    """Compose reads the file itself, so its values are not exported."""
    program = shutil.which("docker")
    works = program and subprocess.run([program, "compose", "version"], check=False).returncode == 0
    if not works:
        pytest.skip("docker compose is not installed")
    checkout.file(".env").write_text(dotenv)
    rest = docker()
    add_program(checkout.tools, "docker", f'[[ $4 != config ]] || exec {program} "$@"\n{rest}')
    shown = checkout.start("docker cpu")
    assert shown.stdout.count(f"-d | unset unset unset {tuned}\n") == 1, shown


def failing(message: str) -> str:
    """A docker whose daemon does not answer."""
    return f'[[ $1 == compose ]] && echo 2.40.3 || {{ echo "{message}" >&2; exit 1; }}'


CDI = [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]


@pytest.mark.parametrize(
    ("flavour", "program", "sentence"),
    [
        ("cpu", None, "docker was not found: install Docker, or use 'start_server.sh local'."),
        ("cpu", "exit 1", "'docker compose' was not found: "),
        ("cpu", docker("2.24.3"), "docker compose 2.24.3 is too old: install 2.24.4 or newer."),
        ("cpu", docker("v2.3.10"), "docker compose 2.3.10 is too old: "),
        *(("cpu", docker(version), None) for version in ("5.0.0", "dev", "2.40.3-desktop.1")),
        ("cpu", failing("permission denied"), "the Docker daemon does not answer, or you may "),
        ("cpu", docker(Runtimes={"runc": {}}, **HERE), None),
        ("gpu", docker(Runtimes={"runc": {}}, **HERE), "docker gpu needs the NVIDIA Container Too"),
        ("gpu", docker(Runtimes={"runc": {}, "nvidia": {}}, **HERE), None),
        ("gpu", docker(DiscoveredDevices=CDI, **HERE), None),
        ("gpu", docker(Name="docker-desktop", Runtimes={"runc": {}}), None),
        ("gpu", docker(Name="another-machine"), None),
    ],
)
def test_unusable_docker_is_reported_in_one_sentence(
    checkout: Checkout, flavour: str, program: str | None, sentence: str | None
) -> None:
    if program is not None:
        add_program(checkout.tools, "docker", program)
    if sentence:
        assert checkout.refusal(f"docker {flavour}").startswith(sentence)
    else:
        assert checkout.start(f"docker {flavour}").returncode == 0


def test_the_hook_of_the_nvidia_toolkit_is_enough_without_a_runtime(checkout: Checkout) -> None:
    add_program(checkout.tools, "docker", docker(Runtimes={"runc": {}}, **HERE))
    add_program(checkout.tools, "nvidia-ctk", "exit 0")
    assert checkout.start("docker gpu").returncode == 0


@pytest.fixture
def taken() -> Iterator[str]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("name", "published", "is_refused"),
    [
        pytest.param(HERE["Name"], "", True, id="native"),
        pytest.param("docker-desktop", "", True, id="desktop"),
        pytest.param("another-machine", "", False, id="elsewhere"),
        pytest.param(HERE["Name"], "127.0.0.1:{}", False, id="our container"),
    ],
)
def test_a_port_in_use_is_reported_before_an_image_is_built(
    checkout: Checkout, taken: str, name: str, published: str, is_refused: bool
) -> None:
    program = docker(published=published.format(taken), port=taken, Name=name)
    add_program(checkout.tools, "docker", program)
    result = checkout.start("docker cpu")
    assert (result.returncode, "up --build" in result.stdout) == (is_refused, not is_refused)
    sentence = f"port {taken} of 127.0.0.1 is in use: stop the program there, or set another PORT."
    assert (sentence in result.stderr) == is_refused

"""The server in a container: what must be there, and what compose is told."""

import sys
from pathlib import Path

import pytest

from tests.launcher.checkout import (
    QWEN,
    ROOT,
    add_docker,
    add_nvidia_smi,
    add_program,
    needs_bash,
    start,
)

pytestmark = needs_bash


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
    tools: Path, line: str, nvidia_smi: str | None, flavour: str, python: str
) -> None:
    add_docker(tools)
    if nvidia_smi:
        add_program(tools, "nvidia-smi", nvidia_smi)
    result = start(*line.split(), PATH=str(tools), PYTHON=python)
    assert result.returncode == 0, result.stderr
    assert f"ran compose -f docker-compose.{flavour}.yml up --build -d |" in result.stdout
    assert f'docker compose -f "{ROOT}/docker-compose.{flavour}.yml" logs -f' in result.stdout
    assert ("http://127.0.0.1:9000/health" in result.stdout) == bool(python)


@pytest.mark.parametrize("python", [sys.executable, ""], ids=["python", "no python"])
def test_docker_that_cannot_start_is_an_error(tools: Path, python: str) -> None:
    add_program(tools, "docker", "[[ $4 != up ]]")
    result = start(PATH=str(tools), PYTHON=python)
    assert result.returncode == 1
    assert result.stderr.startswith("start_server: docker compose could not start")


@pytest.mark.parametrize(
    ("memory", "tuned"), [(r"24576\n8188\n", "8 8192"), (r"[N/A]\n", "unset unset")]
)
def test_a_container_gets_what_the_memory_of_the_gpu_calls_for(
    tools: Path, memory: str, tuned: str
) -> None:
    add_docker(tools)
    add_nvidia_smi(tools, memory)
    result = start(PATH=str(tools), **QWEN)
    assert f"docker-compose.gpu.yml up --build -d | unset {QWEN['RERANKER_MODEL']} {tuned}\n" in (
        result.stdout
    )

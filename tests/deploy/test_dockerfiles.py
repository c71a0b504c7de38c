"""What both images promise, read from their files; scripts/check_images.sh builds and runs one."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from smart_embedder import __version__

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "Dockerfile.cpu", ROOT / "Dockerfile.gpu"]
pytestmark = pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix[1:])


def instructions(file: Path) -> list[str]:
    """Each instruction on one line, without comments."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [line for line in joined.splitlines() if line]


def image(file: Path) -> list[str]:
    """The instructions of the last stage, which is what the image is made of."""
    every = instructions(file)
    (*_, last) = [place for place, line in enumerate(every) if line.startswith("FROM ")]
    return every[last:]


def place(file: Path, pattern: str) -> int:
    """Where the one instruction of the image that matches stands."""
    (found,) = [i for i, line in enumerate(image(file)) if re.search(pattern, line)]
    return found


def test_hadolint_has_nothing_to_say(file: Path) -> None:
    done = subprocess.run(["hadolint", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_base_is_a_build_argument_with_an_exact_tag_and_its_digest(file: Path) -> None:
    base = r"ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}"
    assert re.fullmatch(base, instructions(file)[0])
    assert image(file)[0] == "FROM ${PYTHON_IMAGE}"


def test_torch_has_a_layer_of_its_own_before_anything_that_changes_more_often(file: Path) -> None:
    torch = place(file, r"^RUN .*-r /torch.lock")
    assert f"source=requirements/torch-{file.suffix[1:]}.lock" in image(file)[torch]
    assert (
        torch
        < place(file, r"^RUN .*-r /service.lock")
        < place(file, "^COPY smart_embedder ./smart_embedder$")
    )


def test_every_package_is_installed_by_its_hash(file: Path) -> None:
    installing = [line for line in image(file) if re.search(r"/bin/pip .* install ", line)]
    assert len(installing) == 2
    assert all("--no-deps --require-hashes -r /" in line for line in installing)


def test_the_benchmark_is_inside_beside_the_checks(file: Path) -> None:
    assert "COPY benchmark.py ./" in image(file)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {
        "*",
        "!app",
        "!smart_embedder",
        "!tools",
        "!benchmark.py",
        "!requirements/*.lock",
    } <= set(allowed)


def test_the_service_runs_as_user_1000_and_owns_the_model_cache_alone(file: Path) -> None:
    user = place(file, "^USER ")
    assert image(file)[user] == "USER 1000:1000"
    assert place(file, "install --directory --owner=1000 --group=1000 /app/model_cache") < user
    assert re.search(r"\bHF_HOME=/app/model_cache\b", image(file)[place(file, "^ENV ")])


def test_the_health_check_gives_the_first_download_300_seconds(file: Path) -> None:
    check = image(file)[place(file, "^HEALTHCHECK ")]
    assert "--start-period=300s" in check
    assert "/health'" in json.loads(check.partition(" CMD ")[2])[2]


def test_the_service_is_the_command_without_a_shell_and_another_may_take_its_place(
    file: Path,
) -> None:
    command = image(file)[place(file, "^CMD ")].partition(" ")[2]
    assert json.loads(command) == ["python", "-m", "smart_embedder"]
    assert not any(line.startswith("ENTRYPOINT") for line in image(file))


def test_the_service_listens_for_everyone(file: Path) -> None:
    assert re.search(r"\bHOST=0\.0\.0\.0 +PORT=8000\b", image(file)[place(file, "^ENV ")])
    assert image(file)[place(file, "^EXPOSE ")] == "EXPOSE 8000"


def test_the_labels_tell_the_title_the_licence_and_the_version(file: Path) -> None:
    label = image(file)[place(file, "^LABEL ")]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*?)"', label))
    assert (labels["title"], labels["licenses"]) == ("Smart Embedder", "Apache-2.0")
    assert labels["version"] == __version__
    assert labels["description"]


def test_no_pip_and_no_compiler_is_put_into_the_image(file: Path) -> None:
    whole = "\n".join(image(file))
    assert "venv --without-pip /venv" in whole
    assert "apt-get" not in whole

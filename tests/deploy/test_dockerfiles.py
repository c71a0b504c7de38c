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


def test_the_base_has_an_exact_tag_and_its_digest_and_every_package_its_hash(file: Path) -> None:
    base = r"ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}"
    assert re.fullmatch(base, instructions(file)[0])
    assert image(file)[0] == "FROM ${PYTHON_IMAGE}"
    installing = [line for line in image(file) if re.search(r"/bin/pip .* install ", line)]
    assert len(installing) == 2
    assert all("--no-deps --require-hashes -r /" in line for line in installing)
    # No pip and no compiler is put into the image.
    assert "venv --without-pip /venv" in "\n".join(image(file))
    assert "apt-get" not in "\n".join(image(file))


def test_what_changes_more_often_has_a_later_layer(file: Path) -> None:
    patterns = ["^RUN .*-r /torch.lock", "^RUN .*-r /service.lock"]
    layers = [place(file, each) for each in [*patterns, "^COPY smart_embedder ./smart_embedder$"]]
    assert layers == sorted(layers)
    assert f"source=requirements/torch-{file.suffix[1:]}.lock" in image(file)[layers[0]]
    assert "COPY benchmark.py ./" in image(file)
    allowed = {"*", *(f"!{name}" for name in ("app", "smart_embedder", "tools", "benchmark.py"))}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert allowed | {"!requirements/*.lock"} <= set(ignored)


def test_the_service_runs_as_user_1000_and_owns_the_model_cache_alone(file: Path) -> None:
    user = place(file, "^USER ")
    assert image(file)[user] == "USER 1000:1000"
    assert place(file, "install --directory --owner=1000 --group=1000 /app/model_cache") < user


def test_the_service_is_the_command_and_listens_for_everyone(file: Path) -> None:
    variables = image(file)[place(file, "^ENV ")]
    assert re.search(r"\bHF_HOME=/app/model_cache\b", variables)
    assert re.search(r"\bHOST=0\.0\.0\.0 +PORT=8000\b", variables)
    assert image(file)[place(file, "^EXPOSE ")] == "EXPOSE 8000"
    # Without a shell, and another command may take its place.
    command = image(file)[place(file, "^CMD ")].partition(" ")[2]
    assert json.loads(command) == ["python", "-m", "smart_embedder"]
    assert not any(line.startswith("ENTRYPOINT") for line in image(file))
    # The first download may take 300 seconds.
    check = image(file)[place(file, "^HEALTHCHECK ")]
    assert "--start-period=300s" in check
    assert "/health'" in json.loads(check.partition(" CMD ")[2])[2]


def test_the_labels_tell_the_title_the_licence_and_the_version(file: Path) -> None:
    label = image(file)[place(file, "^LABEL ")]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*?)"', label))
    assert (labels["title"], labels["licenses"]) == ("Smart Embedder", "Apache-2.0")
    assert labels["version"] == __version__
    assert labels["description"]

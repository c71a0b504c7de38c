"""The launcher run for real in a small checkout, and the programs that it looks for."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "start_server.sh"
BASH = shutil.which("bash")
TOOLS = ("bash", "dirname")
QWEN = {"RERANKER_MODEL": "Qwen/Qwen3-Reranker-0.6B"}
PRINT_ENVIRONMENT = """
import json, os, sys, tiny
names = ("DEVICE", "device", "PYTORCH_CUDA_ALLOC_CONF", "EMBEDDING_MODEL",
         "DENSE_EMBEDDING_MODEL", "RERANKER_MODEL", "HF_HUB_OFFLINE",
         "QWEN_RERANK_BATCH_SIZE", "QWEN_RERANK_MAX_LENGTH")
print(json.dumps({name: os.environ[name] for name in names if name in os.environ}
                 | {"tiny": tiny.version, "prefix": sys.prefix, "folder": os.getcwd(),
                    "pid": str(os.getpid()), "FLAGS": " ".join(sys.argv[1:])}))
"""
BUILD = """
import os, sys
print("no compiler", flush=True)
if "BUILD_WAITS_FOR" in os.environ:
    open(os.environ["BUILD_WAITS_FOR"]).read()
sys.exit(int(os.environ.get("BUILD_FAILS", "0")))
"""

BARE = {
    "PATH": os.environ["PATH"],
    "HOME": "/",
    "PIP_NO_INDEX": "1",
    "PYTHON": sys.executable,
    "PORT": "0",
}

# In a checkout where a start has been made: what that showed on a terminal of 80 columns.
SHOWN = "shown"

needs_bash = pytest.mark.skipif(BASH is None, reason="start_server.sh needs bash")


def start(*arguments: str, script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher from another folder, with no terminal and little of our environment."""
    return run([str(BASH), str(script), *arguments], **variables)


def begin(*arguments: str, script: Path, **variables: str) -> "subprocess.Popen[str]":
    """Begin a start whose output is read while it runs."""
    return subprocess.Popen(
        [str(BASH), str(script), *arguments],
        env=BARE | variables,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def refused(*arguments: str, script: Path, **variables: str) -> str:
    """Return the one sentence of a start that is refused."""
    return sentence_of(start(*arguments, script=script, **variables))


def sentence_of(result: subprocess.CompletedProcess[str]) -> str:
    """Return the one sentence, which is all that was said."""
    assert (result.returncode, result.stdout) == (1, ""), result
    (sentence,) = result.stderr.splitlines()
    return sentence.rstrip().removeprefix("start_server: ")


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with no terminal and little of our environment."""
    return subprocess.run(
        command,
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
    """Run the launcher on a terminal of its own; return its exit code and the lines shown.

    A line that was rewritten holds each of its states, behind a carriage return.
    """
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
    return launcher.returncode, shown.decode().removesuffix("\r\n").split("\r\n")


def told_on_terminal(shown: list[str]) -> dict[str, str]:
    """Return what the started app printed, which may stand behind a question."""
    found: dict[str, str] = json.loads(shown[-1][shown[-1].index("{") :])
    return found


def read_terminal(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports the end of a terminal so
        return b""


def told(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return what the started app printed."""
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


def add_program(folder: Path, name: str, text: str) -> Path:
    program = folder / name
    program.write_text(f"#!{BASH}\n{text}\n")
    program.chmod(0o755)
    return program


def add_docker(folder: Path, **known: object) -> Path:
    """Put a `docker` there."""
    return add_program(folder, "docker", docker(**known))


def docker(compose: str = "2.24.4", published: str = "127.0.0.1:9000", **facts: object) -> str:
    """A docker that knows no image yet, and tells what compose would be started with.

    `facts` is what its daemon tells of itself.
    """
    passed = ("DENSE_EMBEDDING_MODEL", "RERANKER_MODEL")
    tuned = ("QWEN_RERANK_BATCH_SIZE", "QWEN_RERANK_MAX_LENGTH")
    values = " ".join(f"${{{name}-unset}}" for name in passed + tuned)
    return f"""case "$1 $4" in
"compose port") echo {published} ;;
"compose ") echo {compose} ;;
"compose up") echo "ran $* | {values}" ;;
"info "*) echo '{json.dumps(facts)}' ;;
"image "*) exit 1 ;;
esac"""


def add_nvidia_smi(folder: Path, memory: str) -> Path:
    text = f'if [[ $1 == --query-gpu=memory.total ]]; then printf "{memory}"; fi'
    return add_program(folder, "nvidia-smi", text)


def write_wheel(folder: Path, version: str, name: str = "tiny") -> Path:
    """Write the smallest package that pip installs, so that the tests need no network."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def locked(wheel: Path) -> str:
    """Return the line of a lock file for a wheel."""
    return f"{wheel} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def make_checkout(folder: Path) -> Path:
    """Return the launcher in a checkout whose app prints what it was started with."""
    ops = folder / "smart_embedder" / "models" / "ops"
    ops.mkdir(parents=True)
    (ops / "build.py").write_text(BUILD)
    (folder / "smart_embedder" / "__main__.py").write_text(PRINT_ENVIRONMENT)
    (folder / "smart_embedder" / "server").mkdir()
    (folder / "tools" / "demo").mkdir(parents=True)
    (folder / "tools" / "demo" / "__main__.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[1]).mkdir(exist_ok=True)\n"
    )
    # What the launcher asks of the real app.
    for name in ("__init__.py", "errors.py", "server/__init__.py", "server/ports.py"):
        shutil.copy(ROOT / "smart_embedder" / name, folder / "smart_embedder" / name)
    pinned = locked(write_wheel(folder, "1.0"))
    torch = locked(write_wheel(folder, "2.0", "torch"))
    (folder / "requirements").mkdir()
    for flavour in ("cpu", "gpu"):
        (folder / f"requirements-{flavour}.txt").write_text("torch==2.0\ntiny==1.0\n")
        (folder / f"requirements/torch-{flavour}.lock").write_text(torch)
    (folder / "requirements/verify.lock").write_text(torch)
    for name in ("service.lock", "demo.txt"):
        (folder / "requirements" / name).write_text(pinned)
    shutil.copytree(
        ROOT / "launcher", folder / "launcher", ignore=shutil.ignore_patterns("__pycache__")
    )
    return Path(shutil.copy(SCRIPT, folder))

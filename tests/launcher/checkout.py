"""A small checkout in which the real launcher runs, and stand-ins for the programs it uses."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "start_server.sh"
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
LIBRARY = "kernels.so"
BUILD = f"""
import os, pathlib, sys
def can_run_kernels(): return True
def library_path(): return pathlib.Path({LIBRARY!r})
if __name__ == "__main__":
    print("1 of 2 files compiled", flush=True)
    print("no compiler", flush=True)
    if "BUILD_WAITS_FOR" in os.environ:
        open(os.environ["BUILD_WAITS_FOR"]).read()
    if "BUILD_FAILS" in os.environ:
        sys.exit(1)
    library_path().touch()
"""

# For a container: the arguments, the status of nvidia-smi if it exists, and the device.
FLAVOURS = [
    ("", None, "cpu"),
    ("", 0, "gpu"),
    ("docker AUTO", 9, "cpu"),
    ("docker CPU", 0, "cpu"),
    ("gpu", None, "gpu"),
]
# Without Python or a complete docker: the arguments, the failing command of docker if there is one,
# and the beginning of the sentence.
_NO_PYTHON = "Python 3.11 or newer was not found: install it, or "
_NO_DOCKER = "docker was not found: install Docker, or use 'start_server."
_NO_COMPOSE = "'docker compose' was not found: install Docker's compose plugin, 2.24.4 or newer."
_NO_DAEMON = "the Docker daemon does not answer, or you may not use it: 'docker info' says why."
WITHOUT_PYTHON = [
    *((line, "nothing", _NO_PYTHON) for line in ("local", "cpu local", "docker cpu --demo")),
    *((line, None, _NO_DOCKER) for line in ("", "Docker GPU")),
    ("", "compose version", _NO_COMPOSE),
    ("", "info", _NO_DAEMON),
]
# The memory in the output of nvidia-smi, and the limits of a Qwen reranker.
MEMORIES = [
    (("24576", "8188"), "8 8192"),
    (("6144",), "4 4096"),
    (("24576",), "16 8192"),
    (("[N/A]",), ""),
]
WHEELS = "wheels"
# Nothing of the environment of the tests, and no network for pip: packages are in the checkout.
BARE = {
    "HOME": "/",
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": WHEELS,
    "PYTHON": sys.executable,
    "PORT": "0",
}
# In a checkout after two starts: the output of the first, which failed because of a wrong hash of a
# package and left the link .venv that it found, and of the second on a terminal of 80 columns.
FAILED, SHOWN = "failed", "shown"
SERVICE_LOCK = "requirements/service.lock"


class Checkout:
    """A small checkout, whose launcher is started from another folder.

    `tools` is the whole PATH: programs that the launcher needs, and the stand-ins of a test.
    """

    def __init__(self, folder: Path, tools: Path) -> None:
        self.folder, self.tools = folder, tools

    def file(self, name: str) -> Path:
        """One of its files."""
        return self.folder / name

    def command(self, line: str, prefix: Sequence[str] = (), **variables: str) -> list[str]:
        """The command that starts the launcher, after `prefix`."""
        environment = BARE | {"PATH": str(self.tools)} | variables
        assigned = (f"{name}={value}" for name, value in environment.items())
        return [*prefix, "env", "-i", *assigned, BASH or "", str(self.file(SCRIPT)), *line.split()]

    def start(
        self, line: str = "", prefix: Sequence[str] = (), **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """Start the launcher without a terminal."""
        return subprocess.run(
            self.command(line, prefix, **variables),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def begin(self, line: str, **variables: str) -> "subprocess.Popen[str]":
        """Begin a start whose output is read while it runs."""
        return subprocess.Popen(
            self.command(line, **variables),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def refusal(self, line: str = "", prefix: Sequence[str] = (), **variables: str) -> str:
        """The sentence of a refused start."""
        return sentence_of(self.start(line, prefix, **variables))

    def prepared_python(self, module: str) -> str:
        """A Python, for the variable PYTHON, that first runs a module with this text."""
        (self.tools / "sitecustomize.py").write_text(module)
        assigned = f'PYTHONPATH="{self.tools}"'
        add_program(self.tools, "prepared-python", f'{assigned} exec {sys.executable} "$@"')
        return str(self.tools / "prepared-python")

    def start_on_terminal(
        self, line: str, answers: str = "", **variables: str
    ) -> tuple[int, list[str]]:
        """Start it on a terminal of its own; its exit status and the lines shown.

        A line that was rewritten holds each of its states, behind a carriage return.
        """
        ours, theirs = os.openpty()
        with subprocess.Popen(
            self.command(line, **variables),
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


def sentence_of(result: "subprocess.CompletedProcess[str]") -> str:
    """The sentence, which must be the whole output."""
    assert (result.returncode, result.stdout) == (1, ""), result
    (sentence,) = result.stderr.splitlines()
    return sentence.rstrip().removeprefix("start_server: ")


def read_app_output(result: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    """The output of the app that was started."""
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


def read_terminal_output(shown: list[str]) -> dict[str, str]:
    """The same on a terminal, where a question may precede it."""
    found: dict[str, str] = json.loads(shown[-1][shown[-1].index("{") :])
    return found


def read_terminal(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports the end of a terminal so
        return b""


def add_program(folder: Path, name: str, text: str) -> None:
    program = folder / name
    program.write_text(f"#!{BASH}\n{text}\n")
    program.chmod(0o755)


def docker(
    compose: str = "2.24.4", published: str = "127.0.0.1:9000", port: str = "0", **facts: object
) -> str:
    """A docker that tells what compose would be started with; `facts` is what its daemon tells.

    In its configuration are the variables of the environment, as the real one shows them.
    """
    passed = ("DENSE_EMBEDDING_MODEL", "RERANKER_MODEL")
    tuned = ("QWEN_RERANK_BATCH_SIZE", "QWEN_RERANK_MAX_LENGTH")
    values = " ".join(f"${{{name}-unset}}" for name in ("DEVICE", *passed, *tuned))
    configured = "\n".join(f"      {name}: ${{{name}:-null}}" for name in passed + tuned)
    config = f"""services:
  embedder:
    build:
      args:
        DEVICE: gpu
    environment:
      DEVICE: ${{DEVICE:-auto}}
{configured}
    ports:
      - published: {port}
"""
    return f"""case "$1 $4" in
"compose port") echo {published} ;;
"compose config") echo "{config}" ;;
"compose ") echo {compose} ;;
"compose up") echo "ran $* | {values}" ;;
"info ") echo '{json.dumps(facts, separators=(",", ":"))}' ;;
esac"""


def write_wheel(folder: Path, version: str, name: str = "tiny") -> str:
    """Write the smallest package that pip installs, and return its line of a lock file."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    return _write_wheel(
        folder,
        name,
        version,
        {
            f"{module}.py": f"version = {version!r}\n".encode(),
            f"{info}/METADATA": (
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}".encode()
            ),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": b"",
        },
    )


def write_installed(folder: Path, name: str) -> str:
    """Write a wheel of an installed package, and return its line of a lock file."""
    package = distribution(name)
    files = {
        str(file): Path(str(file.locate())).read_bytes()
        for file in package.files or ()
        if file.suffix != ".pyc" and file.name != "INSTALLER" and ".." not in file.parts
    }
    return _write_wheel(folder, name, package.version, files)


def _write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> str:
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"{name}=={version.partition('+')[0]} \\\n    --hash=sha256:{digest}\n"


def copy_launcher(folder: Path) -> None:
    """Make a checkout with what the launcher needs until it installs packages."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(
        ROOT / "launcher", folder / "launcher", ignore=shutil.ignore_patterns("__pycache__")
    )
    for file in (ROOT / SCRIPT, *ROOT.glob("docker-compose.*.yml")):
        shutil.copy(file, folder)


def make_checkout(folder: Path) -> None:
    """Make a checkout whose app prints what it was started with."""
    copy_launcher(folder)
    kernels = folder / "smart_embedder" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "build.py").write_text(BUILD)
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text(PRINT_ENVIRONMENT)
    (folder / "tools" / "demo").mkdir(parents=True)
    (folder / "tools" / "demo" / "__main__.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[1]).mkdir(exist_ok=True)\n"
    )
    # The parts of the real app that the launcher imports.
    for name in ("app/__init__", "app/ports", "smart_embedder/__init__", "smart_embedder/errors"):
        shutil.copy(ROOT / f"{name}.py", folder / f"{name}.py")
    shutil.copy(ROOT / "smart_embedder/kernels/__init__.py", kernels)
    requirements = folder / "requirements"
    requirements.mkdir()
    needed = ("python-dotenv", "packaging")
    (requirements / "launcher.lock").write_text(
        "".join(write_installed(folder / WHEELS, name) for name in needed)
    )
    for flavour, version in (("cpu", "2.0+cpu"), ("gpu", "2.0")):  # pip would choose the same one.
        torch = write_wheel(folder / flavour, version, "torch")
        (requirements / f"torch-{flavour}.lock").write_text(f"--find-links {flavour}\n{torch}")
    (folder / SERVICE_LOCK).write_text(write_wheel(folder / WHEELS, "1.0"))
    (requirements / "demo.txt").write_text(write_wheel(folder / WHEELS, "1.0", "tiny-demo"))

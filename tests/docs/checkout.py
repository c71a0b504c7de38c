"""A copy of the repository in which the README's first command is run, and the other examples."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from launcher.venv import Venv
from tests.support.server import REPOSITORY
from tests.support.waiting import LIMIT

BASH = shutil.which("bash") or "bash"
_FOLDERS = ("app", "smart_embedder", "tools", "launcher", "examples", "requirements")


def make_checkout(folder: Path) -> Path:
    """Copy the repository's runnable parts; its .venv is this Python, with everything installed."""
    folder.mkdir()
    for name in _FOLDERS:
        shutil.copytree(REPOSITORY / name, folder / name)  # With what Python has compiled.
    for pattern in ("*.py", "*.sh", "*.txt", "*.toml"):
        for file in REPOSITORY.glob(pattern):
            shutil.copy(file, folder)
    environment = Venv(folder / ".venv")
    environment.python.parent.mkdir(parents=True)
    # Not a link, which would not be seen as part of the environment that is really used.
    environment.python.write_text(f'#!{BASH}\nexec "{sys.executable}" "$@"\n')
    environment.python.chmod(0o755)
    command = environment.python.with_name("smart-embedder")
    command.write_text(f'#!{BASH}\nexec "{sys.executable}" -m smart_embedder_client "$@"\n')
    command.chmod(0o755)
    # The launcher looks there for what is installed.
    packages = environment.folder / "lib" / "python" / "site-packages"
    packages.mkdir(parents=True)
    for package in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
        (packages / package.name).symlink_to(package)
    return folder


def start_demo(checkout: Path, **settings: str) -> "subprocess.Popen[str]":
    """Run the README's first command on a free port; it must install nothing."""
    command = re.search(r"^\./start_server\.sh .*", _readme(), re.MULTILINE)
    assert command
    variables = {"PORT": "0", "PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    return subprocess.Popen(
        [BASH, "-c", f"exec {command[0]}"],
        cwd=checkout,
        env=_minimal_environment(checkout) | variables | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_command(command: Sequence[str], checkout: Path) -> str:
    """Run a command as a reader would who has installed the client, and return its output."""
    completed = subprocess.run(
        command,
        cwd=checkout,
        env=_minimal_environment(checkout)
        | {
            "PATH": os.pathsep.join(map(str, _program_folders(checkout))),
            "PYTHONPATH": str(REPOSITORY / "client" / "src"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert completed.returncode == 0, f"{completed.stdout}{completed.stderr}"
    return completed.stdout


def _program_folders(checkout: Path) -> tuple[Path | str, ...]:
    """Return PATH's folders, those of the client's and of Python's commands first."""
    return Venv(checkout / ".venv").python.parent, Path(sys.executable).parent, os.environ["PATH"]


def _minimal_environment(checkout: Path) -> dict[str, str]:
    """Return a minimal environment without a model hub, whose threads wait as in other tests."""
    inherited = {name: os.environ[name] for name in ("PATH", "GOMP_SPINCOUNT")}
    return inherited | {"HOME": str(checkout.parent), "HF_HUB_OFFLINE": "1"}


def _readme() -> str:
    return (REPOSITORY / "README.md").read_text(encoding="utf-8")

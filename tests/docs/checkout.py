"""A checkout of its own in which blocks are run, and the one place that changes their text."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from launcher.environment import Environment, digest_of
from tests.docs.blocks import Block
from tests.support.server import REPOSITORY

START = ("local", "cpu", "--demo")
BASH = shutil.which("bash") or "bash"
_FOLDERS = ("app", "tools", "launcher")
_INSTALLED = {
    "cpu": ("requirements-torch-cpu.lock", "requirements.lock"),
    "demo": ("requirements-demo.txt",),
}
_SECONDS = 180


def make_checkout(folder: Path) -> Path:
    """A copy of what is started, whose .venv is this Python, with everything installed already."""
    folder.mkdir()
    for name in _FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    for pattern in ("*.py", "*.sh", "*.txt", "*.lock"):
        for file in REPOSITORY.glob(pattern):
            shutil.copy(file, folder)
    environment = Environment(folder / ".venv")
    environment.python.parent.mkdir(parents=True)
    # Not a link, which would not be seen as part of the environment that is really used.
    environment.python.write_text(f'#!{BASH}\nexec "{sys.executable}" "$@"\n')
    environment.python.chmod(0o755)
    for name, files in _INSTALLED.items():
        environment.stamp(name).write_text(digest_of(*(folder / file for file in files)))
    return folder


def start_demo(checkout: Path, **settings: str) -> "subprocess.Popen[str]":
    """The first command of the README, on a free port; it installs nothing, or it fails."""
    variables = {"PORT": "0", "PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    return subprocess.Popen(
        [BASH, "./start_server.sh", *START],
        cwd=checkout,
        env=bare(checkout) | variables | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def bare(checkout: Path) -> dict[str, str]:
    """The least environment, with no model hub in it."""
    return {"PATH": os.environ["PATH"], "HOME": str(checkout.parent), "HF_HUB_OFFLINE": "1"}


def localised(text: str, url: str) -> str:
    """The block with the addresses of this test's servers."""
    for address in ("http://127.0.0.1:8000", "http://localhost:8000"):
        text = text.replace(address, url)
    return text.replace('QdrantClient("http://127.0.0.1:6333")', 'QdrantClient(":memory:")')


def run_block(block: Block, checkout: Path, url: str) -> str:
    """Run a block as its reader would; what it printed."""
    script = localised(block.text, url)
    command = {
        "bash": [BASH, "-e", "-o", "pipefail", "-c", script],
        "python": [sys.executable, "-c", script],
    }[block.language]
    done = subprocess.run(
        command,
        cwd=checkout,
        env=bare(checkout),
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, f"{block.place}\n{done.stdout}{done.stderr}"
    return done.stdout

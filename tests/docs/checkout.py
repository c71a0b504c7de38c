"""A folder like a checkout after the demo's first start, in which the examples run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.local import DEMO_FOLDER
from launcher.venv import Venv
from tests.support.server import REPOSITORY
from tests.support.waiting import LIMIT

BASH = shutil.which("bash") or "bash"


def make_checkout(folder: Path, demo: Path) -> Path:
    """Link what the examples name; the commands of .venv run this Python."""
    folder.mkdir()
    for name in ("examples", "benchmark.py"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / DEMO_FOLDER).symlink_to(demo)
    python = Venv(folder / ".venv").python
    python.parent.mkdir(parents=True)
    for name, arguments in (("python", ""), ("smart-embedder", "-m smart_embedder_client")):
        command = python.with_name(name)
        command.write_text(f'#!{BASH}\nexec "{sys.executable}" {arguments} "$@"\n')
        command.chmod(0o755)
    return folder


def run_command(command: Sequence[str], checkout: Path) -> str:
    """Run a command as a reader would who has installed the client, and return its output."""
    # The client's and Python's commands are first.
    path = (Venv(checkout / ".venv").python.parent, Path(sys.executable).parent, os.environ["PATH"])
    variables = {
        "PATH": os.pathsep.join(map(str, path)),
        "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY / "client" / "src", REPOSITORY))),
        "HOME": str(checkout.parent),
        "HF_HUB_OFFLINE": "1",
        "GOMP_SPINCOUNT": os.environ["GOMP_SPINCOUNT"],
    }
    completed = subprocess.run(
        command,
        cwd=checkout,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert completed.returncode == 0, f"{completed.stdout}{completed.stderr}"
    return completed.stdout

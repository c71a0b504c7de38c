"""Runs a script in a new interpreter."""

import subprocess
import sys
from pathlib import Path

from tests.support.server import REPOSITORY


def run_script(
    script: str, *arguments: str, folder: Path = REPOSITORY, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run a script that can import the repository, with only the given environment."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )

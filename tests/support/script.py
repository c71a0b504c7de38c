"""A script in an interpreter of its own, and what it has said."""

import subprocess
import sys
from pathlib import Path

from tests.support.server import REPOSITORY


def run_script(
    script: str, *arguments: str, folder: Path = REPOSITORY, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """It knows the repository's packages, and nothing of our environment but what is given."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )

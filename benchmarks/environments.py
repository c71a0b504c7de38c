"""Environments for the peers' packages, apart from this project's own."""

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.catalogue import OWN

_REQUIREMENTS = Path(__file__).parents[1] / "requirements"
DEFAULT_FOLDER = Path("~/.cache/smart-embedder/benchmarks").expanduser()


class EnvironmentFailureError(Exception):
    """Packages could not be installed; the text says which and why in one line."""


def interpreter(name: str, folder: Path) -> Path:
    """The Python of the environment `name` under `folder`, which is made or renewed if needed."""
    if name == OWN:
        return Path(sys.executable)
    requirements = _REQUIREMENTS / f"{name}.txt"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = folder / name / "installed"
    python = folder / name / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not stamp.exists() or stamp.read_text() != wanted:
        print(
            f"Installing requirements/{requirements.name} into {folder / name} ...", file=sys.stderr
        )
        venv.create(folder / name, clear=True)
        _install(python, requirements)
        stamp.write_text(wanted)
    return python


def _install(python: Path, requirements: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = ["install", "--quiet", "--retries", "1", "-r", str(requirements)]
    done = subprocess.run([*pip, *install], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        raise EnvironmentFailureError(
            f"requirements/{requirements.name} cannot be installed: {lines[-1]}"
        )

"""The server on this machine: its virtual environment, the demo model, and the app itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.checks import port_of, require_free_port
from launcher.console import WINDOWS, LaunchError
from launcher.gpu import device_kind, require_gpu
from launcher.lock import exclusive
from launcher.venv import Source, Venv, locked, pinned_torch, requirements

DEMO_FOLDER = "smart-embedder-demo"
PYTORCH_INDEX = "https://download.pytorch.org/whl/cu130"


def demo_variables(root: Path) -> dict[str, str]:
    """Return what makes the app serve the demo model for everything and ask no hub.

    An empty DENSE_EMBEDDING_MODEL would not hide one in .env, so it names the same model.
    """
    model = str(root / DEMO_FOLDER)
    return {
        "EMBEDDING_MODEL": model,
        "DENSE_EMBEDDING_MODEL": model,
        "RERANKER_MODEL": "late-interaction",
        "HF_HUB_OFFLINE": "1",
    }


def require_machine(flavour: str, settings: Mapping[str, str]) -> None:
    """Raise `LaunchError` for what the server will need of this machine and does not find."""
    require_free_port(settings.get("HOST", "127.0.0.1"), port_of(settings))
    if flavour == "gpu" and device_kind(settings) != "mps":
        require_gpu()


def install(flavour: str, *, demo: bool) -> None:
    """Install what is missing; a second start waits until the first has done so."""
    with exclusive(Path(".venv.lock"), "installing into .venv") as lock:
        _install(Venv(Path(".venv"), lock), flavour, demo=demo)


def _install(venv: Venv, flavour: str, *, demo: bool) -> None:
    """Bring .venv to the state of the requirements and, for the demo, make its model."""
    venv.make(flavour)
    venv.install(flavour, *sources(flavour))
    if flavour == "cpu":
        venv.build_kernels()
    if not demo:
        return
    venv.install("demo", locked("requirements-demo.txt"))
    made = subprocess.run([venv.python, "-m", "tools.demo", DEMO_FOLDER], check=False)
    if made.returncode:
        raise LaunchError("the demo model could not be made.")


def sources(flavour: str) -> tuple[Source, ...]:
    """Return where the packages come from: each from one index, and torch alone from PyTorch's."""
    return _torch(flavour), locked("requirements.lock")


def _torch(flavour: str) -> Source:
    if not (WINDOWS and flavour == "gpu"):
        return locked(f"requirements-torch-{flavour}.lock")
    # Only PyTorch's own index has builds with CUDA for Windows, and their hashes are not locked.
    file = requirements(flavour)
    return Source(file, ("--no-deps", "--index-url", PYTORCH_INDEX, pinned_torch(file)))


def serve(root: Path) -> int:
    """Become the server, so that it gets the signals; on Windows wait for it instead."""
    command = [str(Venv(root / ".venv").python), "-m", "app"]
    sys.stdout.flush()
    if not WINDOWS:
        os.execv(command[0], command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then drains
    return subprocess.run(command, check=False).returncode

"""The server on this machine: its virtual environment, the demo model, and the app itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.checks import port_of, require_free_port
from launcher.console import WINDOWS, Progress
from launcher.gpu import device_kind, require_gpu
from launcher.lock import exclusive
from launcher.venv import Source, Venv, folder_for, locked, pinned_torch, requirements

DEMO_FOLDER = "smart-embedder-demo"  # Where the service's own --demo looks for it.
PYTORCH_INDEX = "https://download.pytorch.org/whl/cu130"


def require_machine(flavour: str, settings: Mapping[str, str]) -> None:
    """Raise `LaunchError` for what the server will need of this machine and does not find."""
    require_port_of(settings)
    if flavour == "gpu" and device_kind(settings) != "mps":
        require_gpu()


def require_port_of(settings: Mapping[str, str]) -> None:
    """Raise `LaunchError` where the port that the settings name cannot be listened on."""
    require_free_port(settings.get("HOST", "127.0.0.1"), port_of(settings))


def install(flavour: str, *, demo: bool) -> Path:
    """Install what is missing, and return the Python; a second start waits until that is done."""
    with exclusive(Path(".venv.lock"), "installing") as lock:
        venv = Venv(folder_for(flavour), lock, progress=Progress())
        try:
            _install(venv, flavour, demo=demo)
        finally:
            venv.progress.interrupt()
    return venv.python


def _install(venv: Venv, flavour: str, *, demo: bool) -> None:
    """Bring an environment to the state of the requirements and, for the demo, make its model."""
    venv.make(flavour)
    venv.install(flavour, *sources(flavour))
    if flavour == "cpu":
        venv.build_kernels()
    if demo:
        venv.install("demo", locked("requirements/demo.txt", "the demo's package"))
        make_demo(venv)
    venv.progress.finish("Everything is installed.")


def make_demo(venv: Venv) -> None:
    """Make the demo's model, unless it is there."""
    if not Path(DEMO_FOLDER).is_dir():
        venv.progress.step("Making the demo's model")
    venv.run("the demo's model could not be made", "-m", "tools.demo", DEMO_FOLDER)


def sources(flavour: str) -> tuple[Source, ...]:
    """Return where the packages come from: each from one index, and torch alone from PyTorch's."""
    return (
        _torch(flavour),
        locked("requirements/service.lock", "the other packages"),
        locked("requirements/verify.lock", "what vectors are compared with"),
    )


def _torch(flavour: str) -> Source:
    if not (WINDOWS and flavour == "gpu"):
        return locked(f"requirements/torch-{flavour}.lock", "PyTorch")
    # Only PyTorch's own index has builds with CUDA for Windows, and their hashes are not locked.
    file = requirements(flavour)
    options = ("--no-deps", "--index-url", PYTORCH_INDEX, pinned_torch(file))
    return Source(file, "PyTorch", options)


def serve(python: Path, flags: Sequence[str] = ()) -> int:
    """Become the server, so that it gets the signals; on Windows wait for it instead."""
    command = [str(python), "-m", "smart_embedder", *flags]
    sys.stdout.flush()
    if not WINDOWS:
        os.execv(command[0], command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then drains
    return subprocess.run(command, check=False).returncode

"""The server on this machine: its virtual environment, the demo model, and the app itself."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from launcher.checks import port_of, require_free_port
from launcher.console import SCRIPT, WINDOWS, LaunchError, Progress, say
from launcher.gpu import device_kind, gpu_problem
from launcher.venv import Source, Venv, folder_for, locked, requirements

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

DEMO_FOLDER = "smart-embedder-demo"  # Where the service's own --demo looks for it.
PYTORCH_INDEX = "https://download.pytorch.org/whl/cu130"
_SECONDS_BETWEEN_TRIES = 0.5


def require_machine(flavour: str, settings: Mapping[str, str]) -> None:
    """Raise `LaunchError` for what the server will need of this machine and does not find."""
    require_port_of(settings)
    needs_nvidia = flavour == "gpu" and device_kind(settings) != "mps"
    if needs_nvidia and (problem := gpu_problem()):
        raise LaunchError(f"{problem}, or use '{SCRIPT} local cpu'.")


def require_port_of(settings: Mapping[str, str]) -> None:
    """Raise `LaunchError` where the port that the settings name cannot be listened on."""
    require_free_port(settings.get("HOST", "127.0.0.1"), port_of(settings))


def install(flavour: str, *, demo: bool) -> Path:
    """Install what is missing, and return the Python; a second start waits until that is done."""
    with installing_alone() as lock:
        venv = Venv(folder_for(flavour), lock, progress=Progress())
        try:
            _install(venv, flavour, demo=demo)
        finally:
            venv.progress.interrupt()
    return venv.python


@contextmanager
def installing_alone() -> Iterator[int | None]:
    """Hold a lock while the block runs: two that write into one environment leave it broken.

    Yields the descriptor that holds it: a child process that inherits it keeps the lock when this
    process is killed. None where the file cannot be made: then nothing can be installed either.
    """
    try:
        descriptor = os.open(".venv.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield None
        return
    try:
        if not _take(descriptor):
            say("Another start is installing: waiting until it has finished ...")
            while not _take(descriptor):
                time.sleep(_SECONDS_BETWEEN_TRIES)
        yield descriptor
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Try to take the lock, which goes with the last process that has the descriptor."""
    with suppress(BlockingIOError, PermissionError):
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _install(venv: Venv, flavour: str, *, demo: bool) -> None:
    """Bring an environment to the state of the requirements and, for the demo, make its model."""
    venv.make(flavour)
    venv.install(flavour, *sources(flavour))
    if flavour == "cpu":
        venv.build_kernels()
    if demo:
        venv.install("demo", demo_source(venv.folder))
        if not Path(DEMO_FOLDER).is_dir():
            venv.progress.step("Making the demo's model")
        # It leaves one of this version.
        venv.run("the demo's model could not be made", "-m", "tools.demo", DEMO_FOLDER)
    venv.progress.finish("Everything is installed.")


def sources(flavour: str) -> tuple[Source, ...]:
    """Return where the packages come from: each from one index, and torch alone from PyTorch's."""
    if WINDOWS and flavour == "gpu":
        # Only PyTorch's own index has builds with CUDA for it, and their hashes are not locked.
        file = requirements(flavour)
        (pin,) = re.findall(r"(?m)^torch==\S+$", file.read_text("utf-8"))
        torch = Source(file, "PyTorch", ("--no-deps", "--index-url", PYTORCH_INDEX, pin))
    else:
        torch = locked(f"requirements/torch-{flavour}.lock", "PyTorch")
    return torch, locked("requirements/service.lock", "the other packages")


def demo_source(venv: Path) -> Source:
    """Return where the demo's package comes from; only its files are used, on any platform."""
    source = locked("requirements/demo.txt", "the demo's package")
    if not WINDOWS:
        return source
    # It has no wheel for Windows.
    other = ("--only-binary=:all:", "--platform", "manylinux2014_x86_64")
    folder = ("--target", str(venv / "Lib" / "site-packages"))
    return replace(source, arguments=(*source.arguments, *other, *folder))


def serve(python: Path, flags: Sequence[str] = ()) -> int:
    """Become the server, so that it gets the signals; on Windows wait for it instead."""
    command = [str(python), "-m", "smart_embedder", *flags]
    sys.stdout.flush()
    if not WINDOWS:
        os.execv(command[0], command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then drains
    return subprocess.run(command, check=False).returncode

"""Makes a virtual environment if it is missing or broken, and installs packages into it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.console import WINDOWS, LaunchError, run_step, say

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

# An environment is complete if these packages work, because they are installed last.
_LOCK = "requirements/launcher.lock"
_WORKS = "import dotenv, packaging, pip, sys; sys.exit(sys.version_info < (3, 11))"
_SECONDS_BETWEEN_TRIES = 0.5


@dataclass(frozen=True, slots=True)
class Venv:
    """A virtual environment in `folder`."""

    folder: Path

    @property
    def python(self) -> Path:
        """The path of its Python."""
        return self.folder / ("Scripts/python.exe" if WINDOWS else "bin/python")

    @property
    def packages(self) -> list[Path]:
        """The `.dist-info` folder of each installed package."""
        folder = "Lib" if WINDOWS else "lib/python*"
        return list(self.folder.glob(f"{folder}/site-packages/*.dist-info"))

    @property
    def log(self) -> Path:
        """The file with the output of pip and other programs."""
        return self.folder / "install.log"

    def make(self) -> None:
        """Make the environment, unless it exists and works."""
        with suppress(OSError):
            command: list[str | Path] = [self.python, "-c", _WORKS]
            if not subprocess.run(command, capture_output=True, check=False).returncode:
                return
        say(
            f"The first start installs into {self.folder}, which takes a few minutes; "
            f"{self.log} has the details."
        )
        if self.folder.is_symlink() or self.folder.is_file():
            self.folder.unlink()
        # The base Python, because that of an environment may be in the one that is cleared.
        python = getattr(sys, "_base_executable", "") or sys.executable
        command = [python, "-m", "venv", "--clear", self.folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, close_fds=False)
        if done.returncode:
            output = f"{done.stdout}{done.stderr}".strip()
            raise LaunchError(f"'{python} -m venv' could not make {self.folder}: {output}")
        self.install("the launcher's packages", _LOCK)

    def install(self, packages: str, lock: str, *options: str) -> None:
        """Install the packages of a lock file."""
        self.pip(packages, lock, "--require-hashes", "-r", lock, *options)

    def pip(self, packages: str, lock: str, *arguments: str) -> None:
        """Run `pip install` with these arguments; an error names the lock file."""
        for info in self.packages:
            if not is_complete(info):
                shutil.rmtree(info)  # Otherwise pip would consider the package installed.
        pip = [str(self.python), "-m", "pip", "install", "--no-input", "--no-deps", *arguments]
        run_step(f"Installing {packages}", f"pip could not install {lock}", pip, self.log)


def is_complete(package: Path) -> bool:
    """Whether pip has installed a package completely: it writes INSTALLER last."""
    return (package / "INSTALLER").is_file()


@contextmanager
def hold_install_lock() -> Iterator[None]:
    """Hold a lock in the block: two starts that install at once would break the environment.

    Child processes inherit the lock, because pip may outlive a killed launcher.
    """
    try:
        descriptor = os.open(".venv.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # The folder cannot be written, so nothing can be installed there, either.
        yield
        return
    try:
        os.set_inheritable(descriptor, True)
        if not _try_lock(descriptor):
            say("Another start is installing: waiting until it has finished ...")
            while not _try_lock(descriptor):
                time.sleep(_SECONDS_BETWEEN_TRIES)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Try to take the lock, and return whether it was free."""
    with suppress(BlockingIOError, PermissionError):
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False

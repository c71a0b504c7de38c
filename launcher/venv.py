"""A virtual environment: made where it is missing or broken, and filled by pip."""

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

# Its packages are installed last when an environment is made: where they work, it is whole.
_LOCK = "requirements/launcher.lock"
_WORKS = "import dotenv, packaging, pip, sys; sys.exit(sys.version_info < (3, 11))"
_SECONDS_BETWEEN_TRIES = 0.5


@dataclass(frozen=True, slots=True)
class Venv:
    """A virtual environment in `folder`."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its Python."""
        return self.folder / ("Scripts/python.exe" if WINDOWS else "bin/python")

    @property
    def packages(self) -> list[Path]:
        """The `.dist-info` folder of each package that is installed there."""
        folder = "Lib" if WINDOWS else "lib/python*"
        return list(self.folder.glob(f"{folder}/site-packages/*.dist-info"))

    @property
    def log(self) -> Path:
        """The output of pip and of the other programs."""
        return self.folder / "install.log"

    def make(self) -> None:
        """Make the environment, unless the one that is there works."""
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
        # Not that of an environment, which may be the one that is cleared.
        python = getattr(sys, "_base_executable", "") or sys.executable
        command = [python, "-m", "venv", "--clear", self.folder]
        made = subprocess.run(command, capture_output=True, text=True, check=False, close_fds=False)
        if made.returncode:
            said = f"{made.stdout}{made.stderr}".strip()
            raise LaunchError(f"'{python} -m venv' could not make {self.folder}. It said: {said}")
        self.install("what the launcher needs", _LOCK)

    def install(self, packages: str, lock: str, *options: str) -> None:
        """Install the packages of a lock file."""
        self.pip(packages, lock, "--require-hashes", "-r", lock, *options)

    def pip(self, packages: str, lock: str, *arguments: str) -> None:
        """Install what the arguments of pip ask for; where it fails, the lock file is named."""
        for info in self.packages:
            if not is_whole(info):
                shutil.rmtree(info)  # pip would believe that all of the package is there.
        pip = [str(self.python), "-m", "pip", "install", "--no-input", "--no-deps", *arguments]
        run_step(f"Installing {packages}", f"pip could not install {lock}", pip, self.log)


def is_whole(package: Path) -> bool:
    """Return whether pip has installed all of a package: it writes INSTALLER last."""
    return (package / "INSTALLER").is_file()


@contextmanager
def installing_alone() -> Iterator[None]:
    """Hold a lock while the block runs: two starts that install at once leave a broken environment.

    Programs that are started meanwhile hold it, too: pip may outlive a launcher that is killed.
    """
    try:
        descriptor = os.open(".venv.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # A folder that cannot be written: nothing is installed there, either.
        yield
        return
    try:
        os.set_inheritable(descriptor, True)
        if not _take(descriptor):
            say("Another start is installing: waiting until it has finished ...")
            while not _take(descriptor):
                time.sleep(_SECONDS_BETWEEN_TRIES)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Try to take the lock."""
    with suppress(BlockingIOError, PermissionError):
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False

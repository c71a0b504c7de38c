"""Windows' cmd, as Debian's wine has it, in a Windows of its own; quits with all that it started.

Wine looks for programs in its own Windows alone, so what lies on this machine's PATH is not found.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_FOLDERS = os.pathsep.join((os.environ["PATH"], "/usr/lib/wine"))
_QUIET = {"WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree,mshtml="}  # No .NET and no browser.


@dataclass(frozen=True, slots=True)
class Wine:
    """An installed Windows; `program` is wine and `folder` holds the disk C."""

    program: str
    folder: Path

    def run(
        self,
        cwd: Path,
        batch_file: str,
        *arguments: str,
        programs: Path,
        answers: str = "",
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a batch file of `cwd` in cmd, with a folder of programs on its PATH.

        Its name begins with a dot, because wine's cmd takes start_server.bat for `start`.
        """
        return subprocess.run(
            [self.program, "cmd", "/c", f".\\{batch_file}", *arguments],
            env=self.environment | {"WINEPATH": windows_path(programs)} | variables,
            cwd=cwd,
            input=answers,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def environment(self) -> dict[str, str]:
        """What every program of wine needs."""
        home = {"HOME": str(self.folder), "PATH": os.environ["PATH"]}
        return home | _QUIET | {"WINEPREFIX": str(self.folder / "windows")}


@contextmanager
def run_wine(folder: Path) -> Iterator[Wine]:
    """Install a Windows in a folder, which takes 15 seconds and 700 MB."""
    program = find("wine64", "wine")
    server = find("wineserver64", "wineserver")
    if program is None or server is None:
        pytest.skip("wine is not installed: start_server.bat cannot be run")
    wine = Wine(program, folder)
    try:
        subprocess.run(
            [program, "wineboot", "--init"], env=wine.environment, capture_output=True, check=True
        )
        yield wine
    finally:
        for option in ("--kill", "--wait"):
            subprocess.run([server, option], env=wine.environment, check=False)
        shutil.rmtree(folder)  # pytest would keep the last three.


def find(*names: str) -> str | None:
    """Return the first program that is installed; Debian keeps wine's own off the PATH."""
    found = (shutil.which(name, path=_FOLDERS) for name in names)
    return next((program for program in found if program), None)


def windows_path(path: Path) -> str:
    """Return what a file of this machine is called in wine."""
    return "Z:" + str(path).replace("/", "\\")


def write_batch_file(file: Path, lines: Sequence[str]) -> Path:
    """Write a batch file with the line ends that cmd needs."""
    file.write_bytes("".join(f"{line}\r\n" for line in ("@echo off", *lines)).encode())
    return file

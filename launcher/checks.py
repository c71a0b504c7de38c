"""The port and the disk, checked before minutes are spent on installing."""

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.console import LaunchError
from smart_embedder.errors import StartupError
from smart_embedder.server.ports import require_port

_NEED = re.compile(r"^# Disk space: (\d+) MB, and (\d+) MB for downloads", re.MULTILINE)
_MB = 1_000_000
_HIGHEST_PORT = 65535


def port_of(settings: Mapping[str, str]) -> int:
    """Return the port that the settings name, as the app and the compose files read it."""
    text = settings.get("PORT", "8000").strip()
    if not (text.isascii() and text.isdecimal() and int(text) <= _HIGHEST_PORT):
        raise LaunchError(f"PORT={text} is not a port: it is a number from 0 to {_HIGHEST_PORT}.")
    return int(text)


def require_free_port(host: str, port: int) -> None:
    """Raise `LaunchError` where nobody could listen on the port."""
    try:
        require_port(host, port)
    except StartupError as error:
        raise LaunchError(f"{error}.") from error


@dataclass(frozen=True, slots=True)
class Need:
    """What an installation takes in MB: where it is installed, and for a while where pip fetches.

    Requirements say it of themselves, beside the pins that it depends on.
    """

    installed: int
    downloaded: int


def need_of(requirements: Path) -> Need:
    """Return what a requirements file says that it takes; nothing where it does not say."""
    found = _NEED.search(requirements.read_text("utf-8"))
    return Need(int(found[1]), int(found[2])) if found else Need(0, 0)


def require_space_to_install(folder: Path, need: Need) -> None:
    """Raise `LaunchError` where packages do not fit in `folder`, or where pip fetches them."""
    downloads = Path(tempfile.gettempdir())
    if _disk(folder) == _disk(downloads):
        require_space(folder, need.installed + need.downloaded, "make room there")
        return
    require_space(folder, need.installed, "make room there")
    require_space(downloads, need.downloaded, "make room there, or set TMPDIR to a larger disk")


def require_space(folder: Path, megabytes: int, advice: str) -> None:
    """Raise `LaunchError` where the disk of `folder` has less room than `megabytes`."""
    free = shutil.disk_usage(folder).free // _MB
    if free < megabytes:
        raise LaunchError(
            f"installing takes about {_gigabytes(megabytes)} GB on the disk of {folder}, which has "
            f"{_gigabytes(free)} GB free: {advice}."
        )


def _disk(folder: Path) -> int:
    return folder.stat().st_dev


def _gigabytes(megabytes: int) -> str:
    return f"{megabytes / 1000:.1f}"

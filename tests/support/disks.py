"""Disks that are read-only, and files of others, made for real.

Each returns the beginning of a command: what follows it runs under that condition, and it alone.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NOBODY = 65534
_READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'


def read_only(folder: Path) -> list[str]:
    """Mount a folder over itself, read-only.

    That is in a namespace of the command's own, which needs no superuser and ends with it.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("a file system of a test's own needs unshare, of util-linux")
    script = f'{_READ_ONLY} && shift && exec "$@"'
    command = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    tried = subprocess.run([*command, str(folder), "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no file system may be mounted here: {tried.stderr.decode().strip()}")
    return [*command, str(folder)]


def give_up_rights(path: Path) -> list[str]:
    """Give a file or folder to somebody else, whose permissions then count for root too."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() or setpriv is None:
        pytest.skip("only the superuser can give files away, and setpriv his rights over them")
    os.chown(path, NOBODY, NOBODY)
    return [setpriv, "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"]

"""Read-only disks, and files of other users.

The functions return the beginning of a command: the program behind it runs under the condition.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NOBODY = 65534
_READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"'


def read_only(folder: Path) -> list[str]:
    """Mount a folder over itself, read-only, in a new namespace, which needs no superuser."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("a file system of a test's own needs unshare, of util-linux")
    script = f'{_READ_ONLY} && shift && exec "$@"'
    command = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    probe = subprocess.run([*command, str(folder), "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no file system may be mounted here: {probe.stderr.decode().strip()}")
    return [*command, str(folder)]


def give_up_rights(path: Path) -> list[str]:
    """Give a file or folder to another user, whose permissions then count even for root."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() or setpriv is None:
        pytest.skip("only the superuser can give files away, and setpriv drop rights over them")
    os.chown(path, NOBODY, NOBODY)
    return [setpriv, "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"]

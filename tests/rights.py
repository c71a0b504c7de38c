"""Files that cannot be written, also where tests run as the superuser, who passes over permissions.

Each helper returns the beginning of a command: what follows it runs under that condition.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NOBODY = 65534
_MOUNT = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; shift; exec "$@"'


def give_up_rights(path: Path) -> list[str]:
    """Give a file or folder to somebody else, whose permissions then count for root too."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() or setpriv is None:
        pytest.skip("only the superuser can give files away, and setpriv his rights over them")
    os.chown(path, NOBODY, NOBODY)
    return [setpriv, "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"]


def read_only(folder: Path) -> list[str]:
    """Mount a folder over itself, read-only, for the command alone."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("a read-only folder needs unshare, of util-linux")
    command = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh"]
    tried = subprocess.run([*command, str(folder), "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no file system may be mounted here: {tried.stderr.decode().strip()}")
    return [*command, str(folder)]

"""File permissions that count: the superuser, as whom tests may run, passes over them."""

import os
import shutil

import pytest


def give_up_rights() -> list[str]:
    """The beginning of a command that is denied what belongs to others, though it runs as root."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() or setpriv is None:
        pytest.skip("only the superuser can give files away, and setpriv his rights over them")
    return [setpriv, "--bounding-set=-dac_override,-dac_read_search,-fowner,-chown"]

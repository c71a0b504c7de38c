"""Packages that some tools need in addition to those of the service."""

import sys


def install_command() -> str:
    """Return the command that installs them into the environment of this Python."""
    lock = "--no-deps --require-hashes -r requirements/verify.lock"
    return f"{sys.executable} -m pip install {lock}"

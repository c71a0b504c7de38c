"""Caddy as a process, with the project's Caddyfile, on a port of loopback."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.nginx import NAME, run_proxy
from tests.support.ports import free_port
from tests.support.server import REPOSITORY

CADDYFILE = REPOSITORY / "deploy" / "caddy" / "Caddyfile"
# A certificate of Caddy's own, and no port but the one.
_HERE = f"admin off\n local_certs\n default_bind 127.0.0.1\n default_sni {NAME}\n"


@contextmanager
def run_caddy(folder: Path, upstream: str) -> Iterator[str]:
    """Run Caddy in front of a server on loopback."""
    program = shutil.which("caddy")
    if program is None:
        pytest.skip("caddy is not installed (apt-get install caddy)")
    port = free_port()
    text = CADDYFILE.read_text()
    assert "\tadmin off\n" in text
    file = folder / "Caddyfile"
    file.write_text(text.replace("admin off\n", f"{_HERE} auto_https disable_redirects\n"))
    where = {"DOMAIN": f"{NAME}:{port}", "SERVICE": upstream, "HOME": str(folder)}
    command = ["env", *(f"{name}={value}" for name, value in where.items()), program]
    with run_proxy([*command, "run", "--config", str(file)], port) as url:
        yield url

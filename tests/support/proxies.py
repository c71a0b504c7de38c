"""Runs nginx as docs/network.md configures it, and Caddy with the project's Caddyfile."""

import grp
import os
import pwd
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.server import REPOSITORY, free_port
from tests.support.waiting import wait_until

NAME = "embed.example.com"
LIMIT = 500
_GUIDE = (REPOSITORY / "docs" / "network.md").read_text(encoding="utf-8")
_FOLDERS = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"))
_CADDYFILE = REPOSITORY / "deploy" / "caddy" / "Caddyfile"
# A certificate of Caddy's own, and only one port.
_CADDY = f"admin off\n local_certs\n default_bind 127.0.0.1\n default_sni {NAME}\n"
_NGINX = """
user {user} {group};
daemon off;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{server}
}}
"""


def read_guide(language: str) -> str:
    """Return the configuration in docs/network.md."""
    (block,) = re.findall(rf"```{language}\n(.+?)```", _GUIDE, re.DOTALL)
    return str(block)


@contextmanager
def run_proxy(command: list[str], port: int) -> Iterator[str]:
    """Run a proxy until the block ends; yields its address once its port can be reached."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        wait_until(lambda: _listens(port, process), "the proxy never listened")
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT)


def _listens(port: int, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, process.communicate()[0].decode()
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def run_nginx(
    folder: Path, upstream: str, changes: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run nginx with the guide's configuration in front of a server on loopback.

    `changes` replace lines by others, which the guide shows, too.
    """
    program, openssl = shutil.which("nginx", path=_FOLDERS), shutil.which("openssl")
    if program is None or openssl is None:
        pytest.skip("nginx or openssl is not installed (apt-get install nginx-light openssl)")
    certificate, key = _make_certificate(folder, openssl)
    port = free_port()
    server = (
        read_guide("nginx")
        .replace("127.0.0.1:8000", upstream)
        .replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
        # The port is not a default one, so clients name it.
        .replace("Host $host", "Host $http_host")
        .replace("/etc/ssl/embed.example.com.pem", str(certificate))
        .replace("/etc/ssl/embed.example.com.key", str(key))
    )
    for line, replacement in (changes or {}).items():
        assert line in server
        # The guide may break it over two lines.
        assert replacement in " ".join(_GUIDE.split())
        server = server.replace(line, replacement)
    file = _write_configuration(folder, server)
    with run_proxy([program, "-e", "stderr", "-p", str(folder), "-c", str(file)], port) as url:
        yield url


def _make_certificate(folder: Path, openssl: str) -> tuple[Path, Path]:
    """Make a self-signed certificate and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
         f"/CN={NAME}", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


def _write_configuration(folder: Path, server: str) -> Path:
    """Write nginx.conf with a `server` block, for the user of this process."""
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    file = folder / "nginx.conf"
    file.write_text(_NGINX.format(folder=folder, server=server, user=user, group=group))
    return file


@contextmanager
def run_caddy(folder: Path, upstream: str) -> Iterator[str]:
    """Run Caddy in front of a server on loopback."""
    program = shutil.which("caddy")
    if program is None:
        pytest.skip("caddy is not installed (apt-get install caddy)")
    port = free_port()
    text = _CADDYFILE.read_text()
    assert "\tadmin off\n" in text
    file = folder / "Caddyfile"
    file.write_text(text.replace("admin off\n", f"{_CADDY} auto_https disable_redirects\n"))
    variables = {"DOMAIN": f"{NAME}:{port}", "SERVICE": upstream, "HOME": str(folder)}
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), program]
    with run_proxy([*command, "run", "--config", str(file)], port) as url:
        yield url

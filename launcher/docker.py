"""The server in a container, by docker compose."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

from launcher.console import LaunchError, say
from launcher.engine import Engine, docker, require_docker, require_nvidia
from launcher.port import port_of, require_free_port
from launcher.space import require_space

HOST = "127.0.0.1"  # The compose files publish the port here alone.
SERVICE = ("embedder", "8000")
BUILD_MB = {"cpu": 4000, "gpu": 13_000}  # An image, and pip's cache while it is being built.


def require_container(flavour: str, settings: Mapping[str, str]) -> None:
    """Raise `LaunchError` for whatever is missing and can be told before the image is built."""
    engine = require_docker()
    if flavour == "gpu":
        require_nvidia(engine)
    port = port_of(settings)
    if engine.has_our_ports and not is_ours(flavour, port):
        require_free_port(HOST, port)
    require_space_to_build(engine, flavour)


def require_space_to_build(engine: Engine, flavour: str) -> None:
    """Raise `LaunchError` where a first image does not fit; a later one shares its layers."""
    if engine.folder and docker("image", "inspect", f"smart-embedder:{flavour}").returncode:
        require_space(engine.folder, BUILD_MB[flavour], "make room there ('docker system prune')")


def is_ours(flavour: str, port: int) -> bool:
    """Tell whether the port is that of our own container, which compose replaces."""
    return (published(flavour) or "").endswith(f":{port}")


def published(flavour: str) -> str | None:
    """Return the address of the running container's port; None where there is none."""
    answer = docker("compose", "-f", compose_file(flavour), "port", *SERVICE)
    return None if answer.returncode else answer.stdout.strip()


def compose_file(flavour: str) -> str:
    """Return the name of the compose file for a device."""
    return f"docker-compose.{flavour}.yml"


def start_container(flavour: str) -> int:
    """Build and start the service, and say where it answers and where its logs are."""
    file = compose_file(flavour)
    command = ["docker", "compose", "-f", file, "up", "--build", "-d"]
    if subprocess.run(command, check=False).returncode:
        raise LaunchError("docker compose could not start the service; its message above says why.")
    address = published(flavour) or f"{HOST}:8000"
    say(f'Smart Embedder is starting; it is ready when http://{address}/health says "healthy".')
    say(f'Logs: docker compose -f "{Path.cwd() / file}" logs -f')
    return 0

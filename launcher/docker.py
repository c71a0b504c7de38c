"""The server in a container, by docker compose; and first, whether Docker can be used at all."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checks import port_of, require_free_port, require_space
from launcher.console import SCRIPT, LaunchError, last_line, say

HOST = "127.0.0.1"  # The compose files publish the port here alone.
SERVICE = ("embedder", "8000")
# What the compose files set where neither the environment nor .env does.
LIMITS = {"MEMORY_LIMIT": "16g", "PIDS_LIMIT": "2048"}
BUILD_MB = {"cpu": 4000, "gpu": 13_000}  # An image, and pip's cache while it is being built.
OLDEST_COMPOSE = (2, 24, 4)  # None older was tried.
SECONDS_TO_ANSWER = 30
_DESKTOP = "docker-desktop"
_TOOLKIT = ("nvidia-container-runtime-hook", "nvidia-ctk")


@dataclass(frozen=True, slots=True)
class Daemon:
    """What `docker info` tells of the daemon that would run the container."""

    facts: dict[str, Any]

    @property
    def is_native(self) -> bool:
        """Whether the daemon runs on this very machine, and not in a virtual one."""
        return self.facts.get("Name") == socket.gethostname()

    @property
    def has_our_ports(self) -> bool:
        """Whether what it publishes on 127.0.0.1 takes a port of this machine."""
        return self.is_native or self.facts.get("Name") == _DESKTOP

    @property
    def folder(self) -> Path | None:
        """Where images are kept, if that is a folder of this machine."""
        folder = self.facts.get("DockerRootDir")
        return Path(folder) if self.is_native and folder and Path(folder).is_dir() else None

    @property
    def lacks_nvidia(self) -> bool:
        """Whether it surely cannot give a GPU to a container.

        A daemon uses the toolkit's hook as soon as that is installed, without listing a runtime.
        """
        if not self.is_native or any(shutil.which(program) for program in _TOOLKIT):
            return False
        devices = self.facts.get("DiscoveredDevices") or []
        return "nvidia" not in (self.facts.get("Runtimes") or {}) and not any(
            "nvidia" in str(device.get("ID")) for device in devices
        )


def require_docker() -> Daemon:
    """Return the daemon; raise `LaunchError` where it, or the compose plugin, cannot be used."""
    if shutil.which("docker") is None:
        raise LaunchError(f"docker was not found: install Docker, or use '{SCRIPT} local'.")
    _require_compose()
    answer = docker("info", "--format", "{{json .}}")
    if answer.returncode:
        raise LaunchError(_why_not(answer.stderr))
    try:
        facts = json.loads(answer.stdout)
    except ValueError:  # Another program of that name: it is asked no more than this.
        facts = None
    return Daemon(facts if isinstance(facts, dict) else {})


def docker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Ask docker something, and show nothing of it; a daemon that is silent counts as failed."""
    command = ["docker", *arguments]
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=SECONDS_TO_ANSWER,
        )
    except subprocess.TimeoutExpired:
        silence = f"no answer in {SECONDS_TO_ANSWER} seconds"
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=silence)


def _require_compose() -> None:
    needed = ".".join(map(str, OLDEST_COMPOSE))
    answer = docker("compose", "version", "--short")
    if answer.returncode:
        raise LaunchError(
            f"'docker compose' was not found: install Docker's compose plugin, {needed} or newer."
        )
    version = answer.stdout.strip().removeprefix("v")
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_COMPOSE:
        raise LaunchError(f"docker compose {version} is too old: install {needed} or newer.")


def _why_not(said: str) -> str:
    if "permission denied" in said.lower():
        return (
            "you may not use Docker: 'sudo usermod -aG docker $USER' and a new login allow it, or "
            "run this with sudo."
        )
    return (
        f"the Docker daemon does not answer ({last_line(said).rstrip('.')}): start Docker Desktop, "
        "or on Linux 'sudo systemctl start docker'."
    )


def require_container(flavour: str, settings: Mapping[str, str]) -> None:
    """Raise `LaunchError` for whatever is missing and can be told before the image is built."""
    daemon = require_docker()
    if flavour == "gpu" and daemon.lacks_nvidia:
        raise LaunchError(
            "docker gpu needs the NVIDIA Container Toolkit, and Docker does not have it: install "
            f"nvidia-container-toolkit and restart Docker, or use '{SCRIPT} docker cpu'."
        )
    port = port_of(settings)
    # Our own container may have it, which compose replaces.
    if daemon.has_our_ports and not (published(flavour) or "").endswith(f":{port}"):
        require_free_port(HOST, port)
    # A later image shares the layers of the first one.
    if daemon.folder and docker("image", "inspect", f"smart-embedder:{flavour}").returncode:
        require_space(daemon.folder, BUILD_MB[flavour], "make room there ('docker system prune')")


def published(flavour: str) -> str | None:
    """Return the address of the running container's port; None where there is none."""
    answer = docker("compose", "-f", compose_file(flavour), "port", *SERVICE)
    return None if answer.returncode else answer.stdout.strip()


def compose_file(flavour: str) -> str:
    """Return the name of the compose file for a device."""
    return f"docker-compose.{flavour}.yml"


def limits_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the limits of the container: of its memory, and of its threads."""
    return {name: settings.get(name, default) for name, default in LIMITS.items()}


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

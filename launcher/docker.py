"""The server in a container, by docker compose."""

import shutil
import subprocess
from pathlib import Path

from launcher.console import SCRIPT, LaunchError, say


def require_docker() -> None:
    """Raise `LaunchError` where docker or its compose plugin is missing."""
    if shutil.which("docker") is None:
        raise LaunchError(f"docker was not found: install Docker, or use '{SCRIPT} local'.")
    version = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if version.returncode:
        raise LaunchError(
            "'docker compose' was not found: install Docker's compose plugin, 2.24.4 or newer."
        )


def start_container(flavour: str) -> int:
    """Build and start the service, and say where it answers and where its logs are."""
    file = f"docker-compose.{flavour}.yml"
    compose = ["docker", "compose", "-f", file]
    if subprocess.run([*compose, "up", "--build", "-d"], check=False).returncode:
        raise LaunchError("docker compose could not start the service; its message above says why.")
    port = subprocess.run(
        [*compose, "port", "smart-embedder", "8000"], capture_output=True, text=True, check=False
    )
    address = port.stdout.strip() if port.returncode == 0 else "127.0.0.1:8000"
    say(f'Smart Embedder is starting; it is ready when http://{address}/health says "healthy".')
    say(f'Logs: docker compose -f "{Path.cwd() / file}" logs -f')
    return 0

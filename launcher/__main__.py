"""`python -m launcher [local|docker] [cpu|gpu|auto] [--demo]`, from the repository's folder."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.choices import Request, parse_arguments, settings_in_force
from launcher.console import SCRIPT, LaunchError, ask_models, say_settings
from launcher.docker import limits_of, require_container, start_container
from launcher.gpu import choose_flavour, device_variables, tune_reranker
from launcher.local import (
    install,
    require_machine,
    require_port_of,
    serve,
)

USAGE = f"""Usage: {SCRIPT} [local|docker] [cpu|gpu|auto] [--demo]
  local    run in a virtual environment in this folder, which the first start makes
  docker   build and run the container (the default)
  auto     as DEVICE says where it is set, else gpu if nvidia-smi works, else cpu (the default)
  --demo   with local: serve a small model that needs no download from a model hub"""


def main(arguments: list[str], root: Path) -> int:
    """Start what the arguments ask for; 1 with usage or one sentence on stderr where it cannot."""
    if {"-h", "--help"} & {*arguments}:
        print(USAGE)
        return 0
    request = parse_arguments(arguments)
    if request is None:
        print(USAGE, file=sys.stderr)
        return 1
    try:
        os.chdir(root)
        return start(request, root)
    except (LaunchError, OSError) as error:
        print(f"start_server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def start(request: Request, root: Path) -> int:
    """Start a container, or install what is missing and become the server."""
    flavour = choose_flavour(request, current_settings())
    if request.mode == "docker":
        require_container(flavour, current_settings())
        say_settings("Set for this start", choose_settings(request, flavour))
        say_settings("Limits of the container", limits_of(current_settings()))
        return start_container(flavour)
    require_machine(flavour, current_settings())
    chosen = choose_settings(request, flavour)
    python = install(flavour, demo=request.demo)
    require_port_of(current_settings())  # Another start may have taken it meanwhile.
    say_settings("Set for this start", chosen)
    return serve(root / python, ["--demo"] if request.demo else [])


def choose_settings(request: Request, flavour: str) -> dict[str, str]:
    """Set in the environment what nobody has chosen yet, asking where there is a terminal.

    Returns what the launcher has chosen itself, by the arguments and by this machine.
    """
    if not request.demo and os.isatty(0) and os.isatty(1):
        export(ask_models(current_settings()))
    chosen = device_variables(current_settings(), request, flavour)
    if not request.demo:
        chosen |= tune_reranker(current_settings(), flavour)
    export(chosen)
    return chosen


def export(variables: Mapping[str, str]) -> None:
    """Set variables in the environment, also where one has its name in other letters' case."""
    for name in [name for name in os.environ if name.upper() in variables]:
        del os.environ[name]
    os.environ.update(variables)


def current_settings() -> dict[str, str]:
    """Return every variable that is set in the environment or in .env."""
    return settings_in_force(os.environ, Path(".env"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent.parent))

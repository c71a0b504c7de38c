"""`python -m launcher local [cpu|gpu|auto] [--demo]`, run in the repository's folder."""

import sys
from pathlib import Path

from launcher.console import SCRIPT, exec_program, exit_on_error
from launcher.venv import Venv, hold_install_lock

USAGE = f"""Usage: {SCRIPT} [local|docker] [cpu|gpu|auto] [--demo]
  local    run in a virtual environment in this folder, which the first start makes
  docker   build and run the container (the default)
  auto     the device of DEVICE if it is set, else gpu if nvidia-smi works, else cpu (the default)
  --demo   with local: serve a small model that needs no download from a model hub"""


def main(arguments: list[str]) -> int:
    """Make the environment and run the launcher in it, or print the usage for unknown arguments."""
    words = [argument.lower() for argument in arguments]
    if {"-h", "--help"} & {*words}:
        print(USAGE)
        return 0
    demo = ["--demo"] if "--demo" in words else []
    match [word for word in words if word != "--demo"]:
        case ["local"]:
            flavour = "auto"
        case ["local", "cpu" | "gpu" | "auto" as flavour]:
            pass
        case _:
            print(USAGE, file=sys.stderr)
            return 1
    venv = Venv(Path(".venv"))
    with hold_install_lock():
        venv.make()
    return exec_program([str(venv.python), "-m", "launcher.local", flavour, *demo])


if __name__ == "__main__":
    with exit_on_error():
        sys.exit(main(sys.argv[1:]))

"""`python -m launcher local [cpu|gpu|auto] [--demo]`, in the repository's folder."""

import sys
from pathlib import Path

from launcher.console import SCRIPT, become, ending
from launcher.venv import Venv, installing_alone

USAGE = f"""Usage: {SCRIPT} [local|docker] [cpu|gpu|auto] [--demo]
  local    run in a virtual environment in this folder, which the first start makes
  docker   build and run the container (the default)
  auto     as DEVICE says where it is set, else gpu if nvidia-smi works, else cpu (the default)
  --demo   with local: serve a small model that needs no download from a model hub"""


def main(arguments: list[str]) -> int:
    """Make the environment and go on in it; print the usage where the arguments are not known."""
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
    with installing_alone():
        venv.make()
    return become([str(venv.python), "-m", "launcher.local", flavour, *demo])


if __name__ == "__main__":
    with ending():
        sys.exit(main(sys.argv[1:]))

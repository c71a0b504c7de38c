"""For blocks that cannot be run here: what their commands are, and whether they could be.

bash runs the block with stand-ins for every tool it may use. Each notes how it was called, and the
call is then put to whatever would read it: the launcher's parser, a command's argparse, the
settings, the compose files.
"""

import argparse
import json
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import pytest

from app.settings import Settings
from app.settings.flags import parse_flags
from launcher.choices import parse_arguments
from tests.docs.blocks import Block
from tests.docs.checkout import BASH
from tests.support.server import REPOSITORY

_RECORD = f"""#!{sys.executable} -SE
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([sys.argv, dict(os.environ)]), file=calls)
"""
_OWN_SCRIPTS = ("start_server.sh", "run_tests.sh", "scripts/check_images.sh")
_PYTHONS = ("tools/python", ".venv/bin/python")
_COMPOSE_OPTIONS = {"-f": "files", "--profile": "profiles"}
_COMPOSE_COMMANDS = {"up", "down", "logs", "stop", "restart", "ps", "pull", "build", "exec", "run"}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    tool: str
    arguments: list[str]
    environment: dict[str, str]


class Parsed(Exception):  # noqa: N818 - it ends a command at its parser, and is no error
    """A command line has passed its parser."""


def calls_of(block: Block, folder: Path) -> list[Call]:
    """Run a block of commands with stand-ins; the calls in their order."""
    calls = folder / "calls"
    for name in (*_OWN_SCRIPTS, *_PYTHONS, "tools/docker", "tools/nvidia-smi"):
        tool = folder / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(_RECORD)
        tool.chmod(0o755)
    done = subprocess.run(
        [BASH, "-e", "-o", "pipefail", "-c", block.text],
        cwd=folder,
        env={"PATH": str(folder / "tools"), "CALLS": str(calls)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block.place}: {done.stderr}"
    lines = calls.read_text().splitlines() if calls.exists() else []
    assert lines, f"{block.place} calls nothing"
    return [_call(*json.loads(line)) for line in lines]


def check_call(call: Call) -> None:
    """Raise where the tool would not take its arguments, or the service its settings."""
    _check_settings(call.environment)
    _CHECKS[call.tool](call.arguments)


def _call(arguments: list[str], environment: dict[str, str]) -> Call:
    return Call(Path(arguments[0]).name, arguments[1:], environment)


def _check_settings(environment: dict[str, str]) -> None:
    fields = {name.upper(): name for name in Settings.model_fields}
    given = {fields[name]: value for name, value in environment.items() if name in fields}
    Settings(_env_file=None, **given)  # type: ignore[call-arg, arg-type]


def _check_launcher(arguments: list[str]) -> None:
    assert parse_arguments(arguments) is not None, arguments


def _check_run_tests(arguments: list[str]) -> None:
    script = REPOSITORY / "run_tests.sh"
    subprocess.run([BASH, "-n", script], check=True)
    assert all((REPOSITORY / path).exists() for path in arguments), arguments


def _check_images(arguments: list[str]) -> None:
    subprocess.run([BASH, "-n", REPOSITORY / "scripts/check_images.sh"], check=True)


def _check_python(arguments: list[str]) -> None:
    """A module or a script of this repository whose own parser takes the rest."""
    if arguments == ["-m", "tools.verify"]:  # It has no parser: settings are all it reads.
        return
    if arguments[:2] == ["-m", "app"]:
        Settings(_env_file=None, **parse_flags(arguments[2:]))
        return
    is_module = arguments[0] == "-m"
    name, *rest = arguments[is_module:]
    file = _file_of(name) if is_module else REPOSITORY / name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *rest])
        patch.setattr(argparse.ArgumentParser, "parse_args", _parse_and_stop)
        with pytest.raises(Parsed):
            runpy.run_path(str(file), run_name="__main__")


def _file_of(module: str) -> Path:
    path = REPOSITORY / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def _parse_and_stop(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> None:
    _, unknown = parser.parse_known_args(arguments)
    assert not unknown, unknown
    raise Parsed


def _check_docker(arguments: list[str]) -> None:
    """docker compose with files, profiles and a command that there are."""
    compose, *rest = arguments
    given: dict[str, list[str]] = {"files": [], "profiles": []}
    while rest[0] in _COMPOSE_OPTIONS:
        option, value, *rest = rest
        given[_COMPOSE_OPTIONS[option]].append(value)
    assert compose == "compose"
    assert rest[0] in _COMPOSE_COMMANDS, rest
    assert given["files"], arguments
    if rest[0] in {"exec", "run"}:
        _check_inside(list(dropwhile(lambda word: word.startswith("--"), rest[1:])))
    _check_profiles(given["profiles"], [REPOSITORY / name for name in given["files"]])


def _check_inside(words: list[str]) -> None:
    """A command in the service's container: Python's own, or one of this repository."""
    service, program, *rest = words
    assert service == "embedder"
    if program == "sh":
        program, *rest = shlex.split(rest[-1].replace('"$API_TOKEN"', "token"))
    assert program in {"python", "python3"}
    if rest[0] != "-c":
        _check_python(rest)


def _check_profiles(profiles: Iterable[str], files: list[Path]) -> None:
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert all(f"profiles: [{profile}]" in text for profile in profiles)


_CHECKS: dict[str, Callable[[list[str]], None]] = {
    "start_server.sh": _check_launcher,
    "run_tests.sh": _check_run_tests,
    "check_images.sh": _check_images,
    "python": _check_python,
    "docker": _check_docker,
}

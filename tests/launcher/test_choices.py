"""What the arguments, the environment and .env ask for."""

from pathlib import Path

import pytest
from dotenv import dotenv_values

from launcher.choices import Request, parse_arguments, read_dotenv, settings_in_force
from tests.launcher.checkout import Checkout


@pytest.mark.parametrize(
    ("line", "request_"),
    [
        ("", Request("docker", "auto", demo=False)),
        ("DOCKER", Request("docker", "auto", demo=False)),
        ("Gpu", Request("docker", "gpu", demo=False)),
        ("local", Request("local", "auto", demo=False)),
        ("LOCAL Cpu --Demo", Request("local", "cpu", demo=True)),
        ("--demo local auto", Request("local", "auto", demo=True)),
        *((line, None) for line in ("bogus", "--help", "local tpu", "cpu local", "local docker")),
        *((line, None) for line in ("cpu gpu", "local cpu gpu", "local local")),
        *((line, None) for line in ("--demo", "docker --demo", "cpu --demo")),
    ],
)
def test_arguments_in_any_case_have_their_defaults_and_anything_else_is_no_request(
    line: str, request_: Request | None
) -> None:
    assert parse_arguments(line.split()) == request_


@pytest.mark.parametrize(
    ("line", "status"), [("-h", 0), ("local --help", 0), ("bogus", 1), ("docker --demo", 1)]
)
def test_usage_is_printed_for_help_and_for_what_is_no_request(
    checkout: Checkout, line: str, status: int
) -> None:
    result = checkout.start(line)
    assert result.returncode == status
    printed, empty = (result.stderr, result.stdout)[:: 1 if status else -1]
    assert printed.startswith("Usage: start_server.sh [local|docker] [cpu|gpu|auto] [--demo]")
    assert empty == ""


DOTENV = """
# DEVICE=cuda
PLAIN=a b
export SPACED = value   # comment
  SINGLE='it # is'  # comment
DOUBLE="quoted value"
'KEY'=key
HASH=a#b
TWICE=1
TWICE=2
EMPTY=
no assignment
"""


def test_env_files_are_read_as_the_app_reads_them(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(DOTENV)
    theirs = {name: value for name, value in dotenv_values(file).items() if value is not None}
    assert read_dotenv(DOTENV) == theirs
    assert len(theirs) == 8


def test_the_environment_wins_over_the_env_file_unless_it_is_empty(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    assert settings_in_force({"device": "cpu", "PORT": ""}, file) == {"DEVICE": "cpu"}
    file.write_text("Device=cuda\nPORT=1\nHOST=\n")
    assert settings_in_force({"device": "cpu", "PORT": ""}, file) == {"DEVICE": "cpu", "PORT": "1"}

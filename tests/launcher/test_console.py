"""Questions on a terminal, and the effect of the answers."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from launcher.console import ask_models
from tests.launcher.checkout import (
    SHOWN,
    Checkout,
    add_program,
    docker,
    read_terminal,
    read_terminal_output,
)

QWEN_DENSE, QWEN_RERANKER = "Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Reranker-0.6B"
BGE_RERANKER = "BAAI/bge-reranker-v2-m3"
OFFERED = (
    ("BGE", "BAAI/bge-m3"),
    ("QWEN", QWEN_DENSE),
    ("BGE", BGE_RERANKER),
    ("QWEN", QWEN_RERANKER),
)
ASKED = "BGE or QWEN [BGE]: "


@pytest.mark.parametrize(
    ("answers", "dense", "reranker"),
    [
        pytest.param("\n\n", None, BGE_RERANKER, id="enter"),
        pytest.param("qwen\n Bge \n", QWEN_DENSE, BGE_RERANKER, id="qwen and bge"),
        pytest.param("other\nBGE\n2\nQWEN\n", None, QWEN_RERANKER, id="asked again"),
        pytest.param("", None, BGE_RERANKER, id="end of input"),
    ],
)
def test_it_asks_for_a_model_until_the_answer_is_one(
    monkeypatch, capsys, answers: str, dense: str | None, reranker: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
    found = ask_models({})
    assert (found.get("DENSE_EMBEDDING_MODEL"), found["RERANKER_MODEL"]) == (dense, reranker)
    text = capsys.readouterr().out
    assert text.count(ASKED) == max(2, answers.count("\n"))
    assert text.count("That is neither BGE nor QWEN.") == max(0, answers.count("\n") - 2)
    for word, model in OFFERED:
        assert re.search(rf"^  {word} +{model}, \d\.\d GB", text, re.MULTILINE)


def test_on_a_terminal_it_asks_for_unset_models_and_prints_the_limits(
    started: Checkout,
) -> None:
    _, both = started.start_on_terminal("local cpu", "\x04\x04")
    assert "DENSE_EMBEDDING_MODEL" not in read_terminal_output(both)
    assert "\n".join(both).count(ASKED) == 2
    assert any(line.endswith("Set for this start: DEVICE=cpu.") for line in both)
    started.file(".env").write_text("DENSE_EMBEDDING_MODEL=my/model\n")
    _, one = started.start_on_terminal("local cpu", "qwen\n")
    found = read_terminal_output(one)
    assert (found["RERANKER_MODEL"], found["QWEN_RERANK_BATCH_SIZE"]) == (QWEN_RERANKER, "1")
    limits = "QWEN_RERANK_BATCH_SIZE=1, QWEN_RERANK_MAX_LENGTH=2048"
    assert any(line.endswith(f"Set for this start: DEVICE=cpu, {limits}.") for line in one)
    _, none = started.start_on_terminal("local cpu", RERANKER_MODEL="none")
    assert read_terminal_output(none)["RERANKER_MODEL"] == "none"
    assert ASKED not in "\n".join(none)


def test_a_terminal_shows_the_progress_of_each_step_and_the_demo_asks_nothing(
    started: Checkout,
) -> None:
    first = json.loads(started.file(SHOWN).read_text())
    _, demo = started.start_on_terminal("local cpu --demo", COLUMNS="80")
    assert read_terminal_output(demo)["FLAGS"] == "--demo"
    assert ASKED not in "\n".join(demo)
    of_first = ("Installing PyTorch ... Successfully installed torch-2.0+cpu",)
    of_first += ("Installing the other packages ... Successfully installed tiny-1.0",)
    of_first += ("Building the kernels ... 1 of 2 files compiled", "Building the kernels ...")
    of_demo = ("Installing the demo's package ... Successfully", "Preparing the demo ...")
    for shown, texts in ((first, of_first), (demo, of_demo)):
        states = [state.rstrip() for line in shown for state in line.split("\r")]
        for text in texts:
            assert any(state.startswith(text) for state in states), text
        assert max(len(state) for state in states if " ... " in state) < 80


@pytest.mark.parametrize(
    ("answers", "expected", "wrong"),
    [
        pytest.param("qwen\nsparse\nqwen\n", f"{QWEN_DENSE} {QWEN_RERANKER} 1 2048", 1, id="qwen"),
        pytest.param("\n\n", f"unset {BGE_RERANKER} unset unset", 0, id="enter"),
    ],
)
def test_a_container_gets_the_answers(
    checkout: Checkout, answers: str, expected: str, wrong: int
) -> None:
    add_program(checkout.tools, "docker", docker())
    _, shown = checkout.start_on_terminal("docker", answers)
    text = "\n".join(shown)
    assert "  QWEN  Qwen/Qwen3-Embedding-0.6B, 1.2 GB more." in text
    assert text.count("That is neither BGE nor QWEN.") == wrong
    for limit in ("QWEN_RERANK_BATCH_SIZE=1", "QWEN_RERANK_MAX_LENGTH=2048"):
        assert (f"Set for this start: {limit}." in text) == expected.endswith("1 2048")
    assert any(line.endswith(f"up --build -d | unset {expected}") for line in shown)


def test_an_interrupt_at_a_question_ends_it_without_a_traceback(started: Checkout) -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen(
        started.command("local cpu"), stdin=theirs, stdout=theirs, stderr=subprocess.PIPE
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

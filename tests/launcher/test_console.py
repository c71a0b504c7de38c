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
    QWEN,
    ROOT,
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
    started.file(".env").write_text("DENSE_EMBEDDING_MODEL=my/model\n")
    _, shown = started.start_on_terminal("local cpu", "qwen\n")
    assert "\n".join(shown).count(ASKED) == 1
    found = read_terminal_output(shown)
    assert (found["RERANKER_MODEL"], found["QWEN_RERANK_BATCH_SIZE"]) == (QWEN_RERANKER, "1")
    limits = "QWEN_RERANK_BATCH_SIZE=1, QWEN_RERANK_MAX_LENGTH=2048"
    assert any(line.endswith(f"Set for this start: DEVICE=cpu, {limits}.") for line in shown)


def test_the_demo_asks_nothing_and_a_terminal_shows_the_progress_of_each_step(
    started: Checkout,
) -> None:
    """The demo gets the flag and its model, and no limits for a reranker that it does not serve."""
    first = json.loads(started.file(SHOWN).read_text())
    # The first command of the README.
    (line,) = re.findall(r"(?m)^\./start_server\.sh (.* --demo)$", (ROOT / "README.md").read_text())
    _, demo = started.start_on_terminal(line.swapcase(), COLUMNS="80", **QWEN)
    found = read_terminal_output(demo)
    assert found["FLAGS"] == "--demo"
    assert "QWEN_RERANK_BATCH_SIZE" not in found
    assert started.file("smart-embedder-demo").is_dir()
    of_first = ("Installing the other packages ... Successfully installed tiny-1.0",)
    of_first += ("Building the kernels ... 1 of 2 files compiled", "Building the kernels ...")
    of_demo = ("Installing the demo's package ... Successfully", "Preparing the demo ...")
    for shown, texts in ((first, of_first), (demo, of_demo)):
        assert ASKED not in "\n".join(shown), "both models are set, or it is the demo"
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

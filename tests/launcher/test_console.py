"""What is asked on a terminal, and what the answers do."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launcher.checkout import (
    BARE,
    BASH,
    SCRIPT,
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
    found = told_on_terminal(shown)
    assert found.get("DENSE_EMBEDDING_MODEL") == dense
    assert found["RERANKER_MODEL"] == reranker
    assert found.get("QWEN_RERANK_BATCH_SIZE") == ("1" if "Qwen" in reranker else None)
    asked = "\n".join(shown).count("BGE or QWEN [BGE]: ")
    assert asked == max(2, answers.count("\n"))


def test_on_a_terminal_it_asks_only_for_what_is_not_set(started: Path) -> None:
    settings = started.with_name(".env")
    settings.write_text("DENSE_EMBEDDING_MODEL=my/model\n")
    _, one = start_on_terminal("qwen\n", "local", "cpu", script=started)
    _, none = start_on_terminal("", "local", "cpu", script=started, RERANKER_MODEL="none")
    settings.unlink()
    assert told_on_terminal(one)["RERANKER_MODEL"] == "Qwen/Qwen3-Reranker-0.6B"
    assert "BGE or QWEN" not in "\n".join(none)
    assert told_on_terminal(none)["RERANKER_MODEL"] == "none"


def test_demo_asks_nothing(started: Path) -> None:
    _, shown = start_on_terminal("", "local", "cpu", "--demo", script=started)
    assert told_on_terminal(shown)["RERANKER_MODEL"] == "late-interaction"
    assert "BGE or QWEN" not in "\n".join(shown)


def test_a_container_gets_the_answers(tools: Path) -> None:
    add_docker(tools)
    _, shown = start_on_terminal("qwen\nqwen\n", "docker", script=SCRIPT, PATH=str(tools))
    models = "Qwen/Qwen3-Embedding-0.6B Qwen/Qwen3-Reranker-0.6B"
    assert any(line.endswith(f"up --build -d | {models} 1 2048") for line in shown)


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
        assert b"Dense model" in read_terminal(ours)
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr
        assert launcher.stderr.read() == b""
    os.close(ours)
    assert launcher.returncode == 130

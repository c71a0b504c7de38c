"""The demo's questions, all or a few."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

QUESTIONS = Path(__file__).parents[1] / "demo" / "questions"


@pytest.fixture
def demo_questions() -> Path:
    """A data set in BEIR's shape: 120 questions, one to each of 120 passages."""
    return QUESTIONS


@pytest.fixture
def few_questions(tmp_path: Path) -> Callable[[int], Path]:
    """Makes one of the first questions, with as many passages."""

    def make(most: int) -> Path:
        folder = tmp_path / "few-questions"
        shutil.copytree(QUESTIONS, folder)
        for file in ("corpus.jsonl", "queries.jsonl"):
            lines = (QUESTIONS / file).read_text(encoding="utf-8").splitlines(keepends=True)
            (folder / file).write_text("".join(lines[:most]), encoding="utf-8")
        return folder

    return make

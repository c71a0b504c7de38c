"""The words exchanged with the person at the terminal."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

WINDOWS = os.name == "nt"
SCRIPT = "start_server.bat" if WINDOWS else "start_server.sh"


class LaunchError(Exception):
    """A reason not to start, in one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Question:
    """A model that a person at a terminal may choose; the first answer is the default."""

    variable: str
    subject: str
    answers: Mapping[str, str | None]


QUESTIONS = (
    Question(
        "DENSE_EMBEDDING_MODEL",
        "Dense model",
        {"BGE": None, "QWEN": "Qwen/Qwen3-Embedding-0.6B"},
    ),
    Question(
        "RERANKER_MODEL",
        "Reranker",
        {"BGE": "BAAI/bge-reranker-v2-m3", "QWEN": "Qwen/Qwen3-Reranker-0.6B"},
    ),
)


def say(text: str) -> None:
    """Print a line at once, so that it stands before whatever a child process prints."""
    print(text, flush=True)


def ask_models(settings: Mapping[str, str]) -> dict[str, str]:
    """Ask for each model that is not set; return the variables that the answers set."""
    answers = {
        question.variable: ask(question)
        for question in QUESTIONS
        if question.variable not in settings
    }
    return {variable: model for variable, model in answers.items() if model}


def ask(question: Question) -> str | None:
    """Ask until the answer is one of those offered; Enter and the end of input mean the first."""
    default, *others = question.answers
    while True:
        print(f"{question.subject}, {default} or {' or '.join(others)} [{default}]: ", end="")
        sys.stdout.flush()
        answer = sys.stdin.readline().strip().upper() or default
        if answer in question.answers:
            return question.answers[answer]

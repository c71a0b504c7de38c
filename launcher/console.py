"""The words exchanged with the person at the terminal."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WINDOWS = os.name == "nt"
SCRIPT = "start_server.bat" if WINDOWS else "start_server.sh"
_FOLDER = Path(__file__).parent


class LaunchError(Exception):
    """A reason not to start, in one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Question:
    """A model that a person at a terminal may choose; the first answer is the default.

    `text` is a file that says what each answer means; start_server.sh and start_server.bat show it,
    too, where there is no Python.
    """

    variable: str
    subject: str
    text: str
    answers: Mapping[str, str | None]


QUESTIONS = (
    Question(
        "DENSE_EMBEDDING_MODEL",
        "Dense model",
        "dense.txt",
        {"BGE": None, "QWEN": "Qwen/Qwen3-Embedding-0.6B"},
    ),
    Question(
        "RERANKER_MODEL",
        "Reranker",
        "reranker.txt",
        {"BGE": "BAAI/bge-reranker-v2-m3", "QWEN": "Qwen/Qwen3-Reranker-0.6B"},
    ),
)


def say(text: str) -> None:
    """Print a line at once, so that it stands before whatever a child process prints."""
    print(text, flush=True)


def say_settings(text: str, variables: Mapping[str, str]) -> None:
    """Print variables as they would stand in .env, behind a text."""
    if variables:
        listed = ", ".join(f"{name}={value}" for name, value in variables.items())
        say(f"{text}: {listed}.")


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["it says nothing"])[-1]


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
    offered = f"{default} or {' or '.join(others)}"
    say((_FOLDER / question.text).read_text("utf-8").rstrip())
    while True:
        print(f"{question.subject}, {offered} [{default}]: ", end="")
        sys.stdout.flush()
        answer = sys.stdin.readline().strip().upper() or default
        if answer in question.answers:
            return question.answers[answer]
        say(f"That is neither {default} nor {' nor '.join(others)}.")


class Progress:
    """The steps of long work: on a terminal one line that is rewritten, elsewhere a line each.

    Nothing is shown where nothing is to be done.
    """

    def __init__(self) -> None:
        self._rewrites = sys.stdout.isatty()
        self._shown = ""
        self._step = ""

    def step(self, text: str) -> None:
        """Show what is done now."""
        self._step = text
        if self._rewrites:
            self._rewrite(f"{text} ...")
        else:
            say(f"{text} ...")

    def detail(self, text: str) -> None:
        """Show how far the step is; only on a terminal."""
        if self._rewrites:
            self._rewrite(f"{self._step} ... {text}")

    def finish(self, text: str) -> None:
        """Leave a last line, if there was anything to do."""
        if self._step and self._rewrites:
            self._rewrite(text)
            print()
        elif self._step:
            say(text)
        self._step = self._shown = ""

    def interrupt(self) -> None:
        """End the line, so that a message gets one of its own."""
        if self._shown:
            print(flush=True)
        self._shown = ""

    def _rewrite(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        # Padded, because not every terminal of Windows knows how to erase the rest of a line.
        line = text[:width].ljust(min(len(self._shown), width))
        print(f"\r{line}", end="", flush=True)
        self._shown = line.rstrip()

"""Prints messages, asks questions at the terminal, and runs programs."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

WINDOWS = os.name == "nt"
SCRIPT = "start_server.bat" if WINDOWS else "start_server.sh"


class LaunchError(Exception):
    """A reason for not starting, as one sentence for the user."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit with the error as one sentence on stderr, or silently after Ctrl+C."""
    try:
        yield
    except (LaunchError, OSError) as error:
        print(f"start_server: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def say(text: str) -> None:
    """Print a line and flush it, so that it precedes the output of child processes."""
    print(text, flush=True)


def ask_models(settings: Mapping[str, str]) -> dict[str, str]:
    """Ask for the models that are not set; return the variables that the answers set."""
    answers = {}
    if "DENSE_EMBEDDING_MODEL" not in settings:
        models = {"BGE": "", "QWEN": "Qwen/Qwen3-Embedding-0.6B"}
        answers["DENSE_EMBEDDING_MODEL"] = models[ask("Dense model", "dense.txt")]
    if "RERANKER_MODEL" not in settings:
        models = {"BGE": "BAAI/bge-reranker-v2-m3", "QWEN": "Qwen/Qwen3-Reranker-0.6B"}
        answers["RERANKER_MODEL"] = models[ask("Reranker", "reranker.txt")]
    return {name: model for name, model in answers.items() if model}


def ask(subject: str, explanation: str) -> str:
    """Ask until the answer is BGE or QWEN; Enter or the end of input means BGE."""
    say(Path(__file__).with_name(explanation).read_text("utf-8").rstrip())
    while True:
        print(f"{subject}, BGE or QWEN [BGE]: ", end="", flush=True)
        answer = sys.stdin.readline().strip().upper() or "BGE"
        if answer in {"BGE", "QWEN"}:
            return answer
        say("That is neither BGE nor QWEN.")


def run_step(step: str, failure: str, command: Sequence[str | Path], log: Path) -> None:
    """Run a program and append its output to a log; on a terminal also show its latest line.

    Raises `LaunchError`, which begins with `failure`, if the program fails.
    """
    width = shutil.get_terminal_size().columns - 1
    on_terminal = sys.stdout.isatty()
    print(f"{step} ...", end="" if on_terminal else "\n", flush=True)
    lines = ["no output"]
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            # If an index cannot be reached, pip would by default retry five times for each package.
            env={"PIP_RETRIES": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            close_fds=False,  # It inherits the lock of `hold_install_lock`.
        ) as program,
    ):
        for line in program.stdout or ():
            file.write(line)
            lines += [line.strip()] if line.strip() else []
            if on_terminal:
                print(f"\r{f'{step} ... {lines[-1]}'[:width]:{width}}", end="", flush=True)
    if on_terminal:
        print(flush=True)
    if program.returncode:
        *_, said = [line for line in lines if line.startswith("ERROR:")] or lines
        said = said.removeprefix("ERROR:").strip().rstrip(".")
        raise LaunchError(f"{failure} ({said}); {log} has the details.")


def exec_program(command: list[str]) -> int:
    """Replace this process by a program; on Windows, run it and return its exit status."""
    sys.stdout.flush()
    if not WINDOWS:
        os.execv(command[0], command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the server handles Ctrl+C, by draining.
    return subprocess.run(command, check=False).returncode

"""Runs a process that answers every line of JSON with another."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class AnsweringProcess:
    """A process that keeps its imports between questions."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, **question: Any) -> Any:
        self.send(**question)
        return self.answer()

    def send(self, **question: Any) -> None:
        """Send a question without waiting for the answer."""
        self._process.stdin.write(f"{json.dumps(question)}\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)


@contextmanager
def answering_process(command: Sequence[str], **variables: str) -> Iterator[AnsweringProcess]:
    """Run `command` until the block ends; an exception shows the errors it has printed."""
    # With this variable the hub's library would ask no server at all.
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            env=environment | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield AnsweringProcess(process)
        except BaseException as error:
            errors.seek(0)
            error.add_note(errors.read()[-4000:])
            raise
        finally:
            process.stdin.close()
            process.kill()

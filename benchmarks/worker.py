"""One engine in a process of its own, asked through JSON lines on standard input.

    python -m benchmarks.worker

Each line is a request, each gets a line as answer, `{"error": ...}` where it failed:
`{"do": "load", "adapter", "folder", "precision"}` answers the package's `version`;
`{"do": "encode", "texts", "setting", "one_at_a_time", "save"}` answers the `seconds` of each call
and the process's `peak_bytes`, and writes the vectors to the .npz file `save` if it is not null.
Nothing but answers goes to standard output. The process ends with its input.
"""

import importlib
import json
import os
import resource
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks.adapters.interface import Adapter, Setting, Vectors

Message = dict[str, Any]


class Worker:
    """Holds the engine between requests."""

    def __init__(self) -> None:
        self._adapter: Adapter | None = None

    def load(self, request: Message) -> Message:
        """Import the adapter and load its engine."""
        module = importlib.import_module(f"benchmarks.adapters.{request['adapter']}")
        self._adapter = module.load(Path(request["folder"]), request["precision"])
        return {"version": _version(module.PACKAGE)}

    def encode(self, request: Message) -> Message:
        """Run the texts, all in one call or each in its own, and time every call."""
        if self._adapter is None:
            raise RuntimeError("no engine is loaded")
        adapter, setting = self._adapter, Setting(**request["setting"])
        texts: list[str] = request["texts"]
        calls = [[text] for text in texts] if request["one_at_a_time"] else [texts]
        timed = [_time(adapter, call, setting) for call in calls]
        peak = peak_bytes()
        if request["save"]:
            save(Path(request["save"]), [adapter.vectors(answer) for _, answer in timed])
        return {"seconds": [seconds for seconds, _ in timed], "peak_bytes": peak}


def _time(adapter: Adapter, texts: list[str], setting: Setting) -> tuple[float, Any]:
    started = time.perf_counter()
    answer = adapter.encode(texts, setting)
    return time.perf_counter() - started, answer


def _version(package: str) -> str:
    """The package's version; empty for this project, which runs from its folder."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def peak_bytes() -> int:
    """The most memory that this process has had resident."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its figure begins with that of the process that started this one.
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def save(file: Path, answers: list[Vectors]) -> None:
    """The vectors of all calls; an engine without ColBERT leaves them out."""
    dense = np.concatenate([answer.dense for answer in answers])
    colbert = [answer.colbert for answer in answers if answer.colbert is not None]
    if colbert:
        np.savez(file, dense=dense, colbert=np.concatenate(colbert))
    else:
        np.savez(file, dense=dense)


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer until the requests end."""
    worker = Worker()
    handlers = {"load": worker.load, "encode": worker.encode}
    for line in requests:
        request = json.loads(line)
        try:
            answer = handlers[request["do"]](request)
        # Whatever an engine raises is its row of the table, not the end of the comparison.
        except Exception as error:  # noqa: BLE001
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _offer_memory() -> None:
    """Where memory runs out, the kernel is to end this process before any other."""
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")


def main() -> None:
    """Keep standard output for answers; what libraries print goes to standard error."""
    _offer_memory()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()

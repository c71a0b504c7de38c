"""One engine in a process of its own, asked through JSON lines: both ends.

    python -m benchmarks.worker

Each line is a request, each gets a line as answer, `{"error": ...}` where it failed:
`{"do": "load", "adapter", "folder", "precision"}` answers the package's `version`;
`{"do": "encode", "texts", "setting", "one_at_a_time", "save"}` answers the `seconds` of each call
and the process's `peak_bytes`, and writes the vectors to the .npz file `save` if it is not null.
Nothing but answers goes to standard output. The process ends with its input.
"""

import asyncio
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, TextIO

import numpy as np

from benchmarks.adapters.interface import Adapter, Setting, Vectors

Message = dict[str, Any]

_ROOT = Path(__file__).parent.parent
# No engine may reach for a model hub while it is measured.
_VARIABLES = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
_LONGEST_LINE = 2**26


class EngineFailureError(Exception):
    """An engine could not start or answer; the text is one line for its row of the table."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Seconds of each call, and the process's peak of resident memory so far."""

    seconds: list[float]
    peak_bytes: int


class EngineProcess:
    """Asks a worker, one request at a time, and waits at most `patience` seconds for an answer."""

    def __init__(
        self, process: asyncio.subprocess.Process, errors: IO[bytes], patience: float
    ) -> None:
        self._process = process
        self._errors = errors
        self._patience = patience

    async def load(self, adapter: str, folder: Path, precision: str) -> str:
        """The version of the engine's package, once it is loaded."""
        request = {"adapter": adapter, "folder": str(folder), "precision": precision}
        return str((await self._ask({"do": "load", **request}))["version"])

    async def encode(
        self,
        texts: list[str],
        setting: Setting,
        *,
        one_at_a_time: bool = False,
        save: Path | None = None,
    ) -> Encoded:
        """Run the texts; the vectors go to the file `save`."""
        request = {"texts": texts, "setting": asdict(setting), "one_at_a_time": one_at_a_time}
        answer = await self._ask({"do": "encode", **request, "save": str(save) if save else None})
        return Encoded(answer["seconds"], answer["peak_bytes"])

    async def _ask(self, request: Message) -> Message:
        line = await self._exchange(json.dumps(request).encode() + b"\n")
        if not line:
            raise EngineFailureError(await self._last_words())
        answer: Message = json.loads(line)
        if "error" in answer:
            raise EngineFailureError(_one_line(answer["error"]))
        return answer

    async def _exchange(self, request: bytes) -> bytes:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a worker is asked through pipes")
        try:
            self._process.stdin.write(request)
            await self._process.stdin.drain()
            return await asyncio.wait_for(self._process.stdout.readline(), self._patience)
        except TimeoutError:
            raise EngineFailureError(f"no answer within {self._patience:.0f} s") from None
        except ConnectionError:
            return b""

    async def _last_words(self) -> str:
        """What a process that has ended said, or how it ended."""
        code = await self._process.wait()
        if code < 0:
            return f"ended by signal {-code}" + (" (out of memory?)" if code == -9 else "")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return _one_line(lines[-1]) if lines else f"ended with exit code {code}"

    async def stop(self) -> None:
        """End the process, at work or not."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def engine_process(python: Path, patience: float) -> AsyncIterator[EngineProcess]:
    """A worker run by `python`, whose environment holds its engine."""
    with TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            python,
            *("-m", "benchmarks.worker"),
            cwd=_ROOT,
            env=os.environ | _VARIABLES,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_LONGEST_LINE,
        )
        engine = EngineProcess(process, errors, patience)
        try:
            yield engine
        finally:
            await engine.stop()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


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

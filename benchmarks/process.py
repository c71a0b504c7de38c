"""The comparison's end of `benchmarks.worker`: a process that holds one engine."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from benchmarks.adapters.interface import Setting

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

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        line = await self._exchange(json.dumps(request).encode() + b"\n")
        if not line:
            raise EngineFailureError(await self._last_words())
        answer: dict[str, Any] = json.loads(line)
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
async def engine_process(
    python: Path, patience: float, tree: Path = _ROOT
) -> AsyncIterator[EngineProcess]:
    """A worker of the checkout `tree`, run by `python`, whose environment holds its engine."""
    with TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            python,
            *("-m", "benchmarks.worker"),
            cwd=tree,
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

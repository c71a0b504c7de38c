"""Measure one engine in its own process, which reads a request and writes figures, both as JSON.

    python -m benchmarks.worker < request

`measure` starts the process. It loads the engine once and makes all runs. Only the figures go to
standard output; an error of the engine ends the process.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adapters import Setting, Vectors
from tests.support.memory import status_bytes

_ROOT = Path(__file__).parent.parent
# Engines must not use a model hub while they are measured.
_VARIABLES = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
# Variables that keep libraries from faster instructions: oneDNN (in PyTorch and OpenVINO),
# PyTorch's own loops, OpenVINO's other loops (in releases that read OV_CPU_MAX_ISA) and MKL (on
# Intel only). This engine gets the limit by `hide_instructions`.
LIMITS = {
    "avx512_vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "OV_CPU_MAX_ISA": "AVX512_CORE_VNNI"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OV_CPU_MAX_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}


class EngineFailureError(Exception):
    """An engine could not start or answer; the message is one line for the table."""


@dataclass(frozen=True, slots=True)
class Run:
    """Texts for one call, or `one_at_a_time`; the vectors are saved to the .npz file `save`."""

    texts: list[str]
    setting: Setting
    one_at_a_time: bool = False
    save: str = ""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Seconds of each call, and the process's peak resident memory so far."""

    seconds: list[float]
    peak_bytes: int


def measure(
    python: Path,
    adapter: str,
    folder: Path,
    precision: str,
    runs: list[Run],
    *,
    patience: float,
    limit: str = "",
) -> tuple[str, list[Encoded]]:
    """Measure the runs in a new process; return the version of the engine's package and figures.

    `python` has the packages of the adapter, which loads the checkpoint in `folder`. `limit` is a
    key of `LIMITS`. Raises `EngineFailureError`, also after `patience` seconds.
    """
    request = {"adapter": adapter, "folder": str(folder), "precision": precision}
    try:
        done = subprocess.run(
            [python, "-m", "benchmarks.worker"],
            cwd=_ROOT,
            env=os.environ | _VARIABLES | LIMITS.get(limit, {}),
            input=json.dumps(request | {"runs": [asdict(run) for run in runs]}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineFailureError(f"no answer within {patience:.0f} s") from None
    if done.returncode < 0:
        guess = " (out of memory?)" if done.returncode == -9 else ""
        raise EngineFailureError(f"ended by signal {-done.returncode}{guess}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"]
        raise EngineFailureError(lines[-1][:200])
    output = json.loads(done.stdout)
    return output["version"], [Encoded(**run) for run in output["runs"]]


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    if sys.platform == "linux":
        # Not getrusage: on Linux it includes the peak of the parent process before exec.
        return status_bytes("self", "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _run(adapter: Any, run: Run) -> Encoded:
    calls = [[text] for text in run.texts] if run.one_at_a_time else [run.texts]
    seconds, outputs = [], []
    for texts in calls:
        started = time.perf_counter()
        outputs.append(adapter.encode(texts, run.setting))
        seconds.append(time.perf_counter() - started)
    peak = peak_bytes()
    if run.save:
        vectors: list[Vectors] = [adapter.vectors(output) for output in outputs]
        arrays: dict[str, Any] = {"dense": np.concatenate([part.dense for part in vectors])}
        if colbert := [part.colbert for part in vectors if part.colbert is not None]:
            arrays["colbert"] = np.concatenate(colbert)
        np.savez(run.save, **arrays)
    return Encoded(seconds, peak)


def main() -> None:
    """Measure one engine; redirect what libraries print to standard error."""
    # If memory runs out, the kernel should end this process first.
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")
    # With Python's own handler of SIGINT, asyncio.Runner would convert each result to text (for the
    # error of the signal module), and that time would count as the engine's.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    module = importlib.import_module(f"benchmarks.adapters.{request['adapter']}")
    adapter = module.Adapter(Path(request["folder"]), request["precision"])
    runs = [Run(**run | {"setting": Setting(**run["setting"])}) for run in request["runs"]]
    try:
        version = metadata.version(module.PACKAGE)
    except metadata.PackageNotFoundError:  # This project, which runs from its folder.
        version = ""
    json.dump({"version": version, "runs": [asdict(_run(adapter, run)) for run in runs]}, output)
    output.close()
    # Some engines have threads that never end.
    os._exit(0)


if __name__ == "__main__":
    main()

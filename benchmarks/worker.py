"""One engine in a process of its own: a request comes in as JSON, and what was measured goes out.

    python -m benchmarks.worker < request

`measured` asks for it: the engine is loaded once and makes each of the runs. Nothing but the answer
goes to standard output, and an engine's own error ends the process.
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

_ROOT = Path(__file__).parent.parent
# No engine may reach for a model hub while it is measured.
_VARIABLES = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
# How libraries are kept from instructions that the processor has: oneDNN (in PyTorch and OpenVINO)
# and PyTorch's own loops by what they document, and this engine by hiding them from it. OpenVINO's
# other loops obey only from the release that reads OV_CPU_MAX_ISA, and MKL on Intel alone.
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
    """An engine could not start or answer; the text is one line for its row of the table."""


@dataclass(frozen=True, slots=True)
class Run:
    """Texts for one call, or `one_at_a_time`; the vectors go to the .npz file `save`."""

    texts: list[str]
    setting: Setting
    one_at_a_time: bool = False
    save: str = ""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Seconds of each call, and the process's peak of resident memory so far."""

    seconds: list[float]
    peak_bytes: int


def measured(
    python: Path,
    adapter: str,
    folder: Path,
    precision: str,
    runs: list[Run],
    *,
    patience: float,
    limit: str = "",
) -> tuple[str, list[Encoded]]:
    """The version of the engine's package and what came of each run, in a process that then ends.

    `python` has the packages of the adapter, which loads the checkpoint in `folder`. With a
    `limit`, of `LIMITS`, it uses no faster instructions than those. Raises `EngineFailureError`,
    also where it takes longer than `patience` seconds.
    """
    asked = {"adapter": adapter, "folder": str(folder), "precision": precision}
    given = json.dumps(asked | {"runs": [asdict(each) for each in runs]})
    try:
        done = subprocess.run(
            [python, "-m", "benchmarks.worker"],
            cwd=_ROOT,
            env=os.environ | _VARIABLES | LIMITS.get(limit, {}),
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineFailureError(f"no answer within {patience:.0f} s") from None
    if done.returncode < 0:
        why = " (out of memory?)" if done.returncode == -9 else ""
        raise EngineFailureError(f"ended by signal {-done.returncode}{why}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"]
        raise EngineFailureError(lines[-1][:200])
    answer = json.loads(done.stdout)
    return answer["version"], [Encoded(**each) for each in answer["runs"]]


def peak_bytes() -> int:
    """The most memory that this process has had resident."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its figure begins with that of the process that started this one.
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _run(adapter: Any, run: Run) -> Encoded:
    calls = [[text] for text in run.texts] if run.one_at_a_time else [run.texts]
    seconds, answers = [], []
    for texts in calls:
        began = time.perf_counter()
        answers.append(adapter.encode(texts, run.setting))
        seconds.append(time.perf_counter() - began)
    peak = peak_bytes()
    if run.save:
        found: list[Vectors] = [adapter.vectors(each) for each in answers]
        arrays: dict[str, Any] = {"dense": np.concatenate([each.dense for each in found])}
        # An engine without ColBERT leaves them out.
        if colbert := [each.colbert for each in found if each.colbert is not None]:
            arrays["colbert"] = np.concatenate(colbert)
        np.savez(run.save, **arrays)
    return Encoded(seconds, peak)


def main() -> None:
    """Keep standard output for the answer; what libraries print goes to standard error."""
    # Where memory runs out, the kernel is to end this process before any other.
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")
    # With Python's own handler of SIGINT, asyncio.Runner makes a text of every result (it asks the
    # signal module for the handler, whose error names it), which is no work of the engine.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    module = importlib.import_module(f"benchmarks.adapters.{asked['adapter']}")
    adapter = module.Adapter(Path(asked["folder"]), asked["precision"])
    runs = [Run(**each | {"setting": Setting(**each["setting"])}) for each in asked["runs"]]
    try:
        version = metadata.version(module.PACKAGE)
    except metadata.PackageNotFoundError:  # This project, which runs from its folder.
        version = ""
    json.dump({"version": version, "runs": [asdict(_run(adapter, each)) for each in runs]}, answers)
    answers.close()
    # Some engines leave threads that never end.
    os._exit(0)


if __name__ == "__main__":
    main()

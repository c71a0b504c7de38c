"""This machine's NVIDIA GPUs: whether they can be used, and what follows from them.

Whether torch can use them is asked of the driver's own library: nvidia-smi may be missing from
PATH, and it does not know CUDA's compatibility libraries, with which an older driver is new enough.
"""

import ctypes
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.choices import Request
from launcher.console import WINDOWS, say

LIBRARY = "nvcuda.dll" if WINDOWS else "libcuda.so.1"
CUDA_VERSION = 13_000  # As the driver counts: the version that the pinned torch is built for.
OLDEST_DRIVER = 580
MIB_PER_GB = 1024
# The kinds of device that the arguments allow; the first is what DEVICE is set to otherwise.
DEVICES = {
    ("cpu", "local"): ("cpu",),
    ("cpu", "docker"): ("cpu",),
    ("gpu", "local"): ("cuda", "mps"),
    ("gpu", "docker"): ("cuda",),
}
# PyTorch reads it from the environment alone.
ALLOCATOR, ALLOCATOR_OPTIONS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


def gpu_problem() -> str | None:
    """Return why the GPU build of torch could not use a GPU, and what to do; None where it can."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return (
            f"local gpu needs an NVIDIA GPU, and its driver ({LIBRARY}) was not found: install it"
        )
    version = _ask_driver(driver, "cuDriverGetVersion")
    if 0 < version < CUDA_VERSION:
        return (
            f"the NVIDIA driver is too old: it knows CUDA up to {_dotted(version)}, and local gpu "
            f"needs {_dotted(CUDA_VERSION)}: install driver {OLDEST_DRIVER} or newer"
        )
    if driver.cuInit(0) or not _ask_driver(driver, "cuDeviceGetCount"):
        return (
            "local gpu needs an NVIDIA GPU, and the driver finds none that works: see what "
            "nvidia-smi says"
        )
    return None


def _ask_driver(driver: ctypes.CDLL, question: str) -> int:
    """Return the number that a function of the driver writes; 0 where it fails."""
    answer = ctypes.c_int(0)
    return 0 if driver[question](ctypes.byref(answer)) else answer.value


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


@dataclass(frozen=True, slots=True)
class RerankLimits:
    """The most pairs in one forward of the Qwen reranker, and the tokens of one pair."""

    batch_size: int
    max_length: int


CPU_LIMITS = RerankLimits(1, 2048)


def gpu_limits(memory_mib: int) -> RerankLimits:
    """Return what a GPU with this much memory can bear."""
    if memory_mib <= 6 * MIB_PER_GB:
        return RerankLimits(4, 4096)
    if memory_mib <= 8 * MIB_PER_GB:
        return RerankLimits(8, 8192)
    return RerankLimits(16, 8192)


def smallest_memory(report: str) -> int | None:
    """Return the fewest MiB in nvidia-smi's report; None where it names none, as with [N/A]."""
    return min(
        (int(line) for line in report.splitlines() if line.strip().isdecimal()), default=None
    )


def tune_reranker(settings: Mapping[str, str], flavour: str) -> dict[str, str]:
    """Return the limits of a Qwen reranker that are not set and that this machine calls for.

    Where a GPU does not tell its memory, the app's own defaults stay.
    """
    if "qwen" not in settings.get("RERANKER_MODEL", "").lower():
        return {}
    memory = None if flavour == "cpu" else smallest_memory(_output(QUERY) or "")
    if flavour != "cpu" and memory is None:
        return {}
    limits = CPU_LIMITS if memory is None else gpu_limits(memory)
    tuned = {
        "QWEN_RERANK_BATCH_SIZE": str(limits.batch_size),
        "QWEN_RERANK_MAX_LENGTH": str(limits.max_length),
    }
    return {name: value for name, value in tuned.items() if name not in settings}


def choose_flavour(request: Request, settings: Mapping[str, str]) -> str:
    """Resolve `auto`: what DEVICE asks for, or gpu if nvidia-smi works, else cpu.

    A GPU that torch could not use on this machine is told, and passed over.
    """
    if request.flavour != "auto":
        return request.flavour
    if kind := device_kind(settings):
        return "gpu" if kind == "cuda" else "cpu"
    if _output(("nvidia-smi",)) is None:
        return "cpu"
    if request.mode == "local" and (problem := gpu_problem()):
        say(f"The GPU is not used: {problem}.")
        return "cpu"
    return "gpu"


def device_variables(settings: Mapping[str, str], request: Request, flavour: str) -> dict[str, str]:
    """Return the variables of the device: the argument decides, whatever DEVICE says.

    DEVICE stays where it names such a device more closely, as cuda:1 and cpu:0,cpu:1 do, and where
    the argument is auto, which follows it.
    """
    variables: dict[str, str] = {}
    if flavour == "gpu":
        variables[ALLOCATOR] = settings.get(ALLOCATOR, ALLOCATOR_OPTIONS)
    default, *others = DEVICES[flavour, request.mode]
    fits = request.flavour == "auto" or device_kind(settings) in {default, *others}
    if "DEVICE" not in settings or not fits:
        variables["DEVICE"] = default
    return variables


def device_kind(settings: Mapping[str, str]) -> str:
    """Return the kind of device that DEVICE names, without a number; "" for auto and for none."""
    kind = settings.get("DEVICE", "").strip().lower().partition(":")[0]
    return "" if kind == "auto" else kind


def _output(command: tuple[str, ...]) -> str | None:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None

"""What nvidia-smi says of this machine's GPUs, and what follows from it."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.choices import Request

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
    limits = machine_limits(on_cpu=flavour == "cpu")
    if limits is None:
        return {}
    tuned = {
        "QWEN_RERANK_BATCH_SIZE": str(limits.batch_size),
        "QWEN_RERANK_MAX_LENGTH": str(limits.max_length),
    }
    return {name: value for name, value in tuned.items() if name not in settings}


def machine_limits(*, on_cpu: bool) -> RerankLimits | None:
    """Return the limits for the CPU or for the smallest GPU; None where its memory is unknown."""
    if on_cpu:
        return CPU_LIMITS
    memory = smallest_memory(_output(QUERY) or "")
    return None if memory is None else gpu_limits(memory)


def choose_flavour(flavour: str, settings: Mapping[str, str]) -> str:
    """Settle `auto`: what DEVICE asks for, or gpu if nvidia-smi works, else cpu."""
    if flavour != "auto":
        return flavour
    if kind := device_kind(settings):
        return "gpu" if kind == "cuda" else "cpu"
    return "cpu" if _output(("nvidia-smi",)) is None else "gpu"


def device_variables(settings: Mapping[str, str], request: Request, flavour: str) -> dict[str, str]:
    """Return the variables of the device: the argument decides, whatever DEVICE says.

    DEVICE stays where it names such a device more closely, as cuda:1 and cpu:0,cpu:1 do, and where
    the argument is auto, which follows it.
    """
    variables = {}
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

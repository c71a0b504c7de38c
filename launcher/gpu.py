"""Chooses the device by the argument and DEVICE, and the settings that depend on it.

NVIDIA's driver library is asked whether torch can use a GPU. nvidia-smi may be missing from PATH,
and does not know CUDA's compatibility libraries, with which torch can use an older driver.
"""

import ctypes
import os
import subprocess
from collections.abc import Mapping

from launcher.console import WINDOWS, say

LIBRARY = "nvcuda.dll" if WINDOWS else "libcuda.so.1"
CUDA_VERSION = 13_000  # The CUDA version of the pinned torch, 13.0, as the driver reports it.
OLDEST_DRIVER = 580
# QWEN_RERANK_BATCH_SIZE and QWEN_RERANK_MAX_LENGTH on a CPU.
CPU_LIMITS = (1, 2048)
# PyTorch reads it only from the environment.
ALLOCATOR, ALLOCATOR_OPTIONS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"


def find_gpu_problem() -> str | None:
    """Return why the GPU build of torch cannot use a GPU, and what to do; None if it can."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return (
            f"local gpu needs an NVIDIA GPU, and its driver ({LIBRARY}) was not found: install it"
        )
    version = _ask_driver(driver, "cuDriverGetVersion")
    if 0 < version < CUDA_VERSION:
        return (
            "the NVIDIA driver is too old: it knows CUDA up to "
            f"{version // 1000}.{version % 1000 // 10}, and local gpu needs "
            f"{CUDA_VERSION // 1000}.0: install driver {OLDEST_DRIVER} or newer"
        )
    if driver.cuInit(0) or not _ask_driver(driver, "cuDeviceGetCount"):
        return (
            "local gpu needs an NVIDIA GPU, and the driver finds none that works: see the output "
            "of nvidia-smi"
        )
    return None


def _ask_driver(driver: ctypes.CDLL, question: str) -> int:
    """Return the number that a function of the driver writes; 0 if it fails."""
    answer = ctypes.c_int(0)
    return 0 if driver[question](ctypes.byref(answer)) else answer.value


def choose_flavour(argument: str, settings: Mapping[str, str]) -> str:
    """Return cpu or gpu; for auto by DEVICE if it is set, else gpu if one can be used."""
    if argument != "auto":
        return argument
    if kind := device_kind(settings):
        return "gpu" if kind == "cuda" else "cpu"
    if not nvidia_smi():
        return "cpu"
    if problem := find_gpu_problem():
        say(f"The GPU is not used: {problem}.")
        return "cpu"
    return "gpu"


def device_variables(argument: str, flavour: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the device: DEVICE, unless it fits already, and the allocator."""
    variables: dict[str, str] = {}
    if flavour == "gpu" and not os.environ.get(ALLOCATOR):
        variables[ALLOCATOR] = settings.get(ALLOCATOR, ALLOCATOR_OPTIONS)
    allowed = ("cuda", "mps") if flavour == "gpu" else ("cpu",)
    if "DEVICE" not in settings or (argument != "auto" and device_kind(settings) not in allowed):
        variables["DEVICE"] = allowed[0]
    return variables


def device_kind(settings: Mapping[str, str]) -> str:
    """Return the kind of device in DEVICE, without its number; "" if it is auto or not set."""
    kind = settings.get("DEVICE", "").strip().lower().partition(":")[0]
    return "" if kind == "auto" else kind


def gpu_limits(memory_mib: int) -> tuple[int, int]:
    """Return the limits of a Qwen reranker on a GPU, in the order of `CPU_LIMITS`."""
    if memory_mib <= 6 * 1024:
        return (4, 4096)
    return (8 if memory_mib <= 8 * 1024 else 16, 8192)


def tune_reranker(flavour: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the limits of a Qwen reranker that are not set, by the memory of the smallest GPU.

    If no GPU reports its memory ([N/A]), returns nothing, and the defaults of the app remain.
    """
    if "qwen" not in settings.get("RERANKER_MODEL", "").lower():
        return {}
    limits = CPU_LIMITS
    if flavour == "gpu":
        report = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
        memories = [int(word) for word in report.split() if word.isdecimal()]
        if not memories:
            return {}
        limits = gpu_limits(min(memories))
    names = ("QWEN_RERANK_BATCH_SIZE", "QWEN_RERANK_MAX_LENGTH")
    tuned = dict(zip(names, map(str, limits), strict=True))
    return {name: limit for name, limit in tuned.items() if name not in settings}


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; an empty string if it fails or is missing."""
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""

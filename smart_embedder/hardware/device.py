"""The device and dtype that the settings name, the device's memory, and the time of a call."""

import gc
import platform
import re
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil
import structlog
import torch

from smart_embedder.errors import StartupError
from smart_embedder.hardware.cpu import available_threads, find_control_groups, read_system_file
from smart_embedder.interface import MemoryUsage
from smart_embedder.settings import FLOAT8, INT8

log = structlog.get_logger(__name__)

# Held while a CUDA graph is captured. Meanwhile PyTorch's allocator cannot return memory: it raises
# an error in any thread that asks for it.
capture_lock = threading.RLock()
# Memory that the system can reclaim only by swapping, as version 1 and version 2 of control groups
# name it. (Version 1 also has "shmem", which leaves out a group's children.)
_UNRECLAIMABLE = ({"total_rss", "total_shmem"}, {"anon", "shmem", "kernel"})
_STATUS, _RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# A larger limit means no limit in version 1 of control groups.
_NO_LIMIT = 1 << 60
# `time_fastest_run` stops after this many runs, or after this many seconds.
_MAX_RUNS = 3
_LONG_SECONDS = 0.2


def choose_device(name: str) -> torch.device:
    """Return the device that DEVICE names; `auto` prefers a CUDA GPU, then Apple's, then the CPU.

    Raises `StartupError` if this machine does not have the device.
    """
    if name == "auto":
        return torch.device(_best_device())
    device = torch.device(name)
    if device.type == "cpu":  # PyTorch has one CPU; the number in `cpu:1` is a worker's.
        return torch.device("cpu")
    if device.type == "cuda":
        if not _has_cuda():
            raise StartupError(
                f"DEVICE={name} needs an NVIDIA GPU that PyTorch {torch.__version__} can use, and "
                f"it sees none ({_explain_missing_cuda()}); check nvidia-smi and the driver, or "
                "set DEVICE=cpu"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise StartupError(f"DEVICE={name}: there are only {torch.cuda.device_count()} GPUs")
        if reason := _explain_missing_kernels(device):
            raise StartupError(f"DEVICE={name}: {reason}; set DEVICE=cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise StartupError("DEVICE=mps needs an Apple GPU, and there is none here")
    return device


def _best_device() -> str:
    reason = None
    if _has_cuda():
        reason = _explain_missing_kernels(torch.device("cuda"))
        if reason is None:
            return "cuda"
    elif torch.backends.mps.is_available():
        return "mps"
    elif torch.version.cuda:  # PyTorch's build for GPUs is installed, so a GPU was expected.
        reason = _explain_missing_cuda()
    if reason is not None:
        log.warning("no_gpu_used", reason=reason, device="cpu")
    return "cpu"


def _has_cuda() -> bool:
    """Whether PyTorch can use a GPU, without the warnings that PyTorch would print."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def _explain_missing_cuda() -> str:
    """Return the first sentence of PyTorch's reason, such as a missing or too old driver."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0].split(". ")[0].rstrip(".")
    return "PyTorch sees no GPU"


def _explain_missing_kernels(device: torch.device) -> str | None:
    """Return why this build of PyTorch cannot compute on a GPU that it sees; None if it can.

    Machine code (`sm`) runs on its compute capability and later ones of the same major number. Code
    that the driver compiles (`compute`) runs on all later ones.
    """
    gpu = torch.cuda.get_device_capability(device)
    known = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    built = [(kind, (int(major), int(minor))) for kind, major, minor in known]
    if not built or any(
        capability <= gpu and (kind == "compute" or capability[0] == gpu[0])
        for kind, capability in built
    ):
        return None
    (major, minor), (lowest_major, lowest_minor) = gpu, min(capability for _, capability in built)
    return (
        f"PyTorch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)}, "
        f"which has compute capability {major}.{minor}; its kernels begin with "
        f"{lowest_major}.{lowest_minor}"
    )


def choose_dtype(name: str, device: torch.device, *, qwen: bool = False) -> torch.dtype:
    """Return the number format that DTYPE names; `auto` takes the device's fastest native format.

    Qwen3's states can leave the range of float16, so on a GPU `auto` takes bfloat16 for it, and
    float32 on NVIDIA GPUs before Ampere and on Apple's. For `int8` and `float8` the result is the
    format of everything except matrix products. Raises `StartupError` if the device does not
    support the format.
    """
    on_cpu = device.type == "cpu"
    if name == FLOAT8:
        if not has_float8(device):
            raise StartupError(
                "DTYPE=float8 needs an NVIDIA GPU of compute capability 8.9 or newer (Ada, Hopper, "
                f"Blackwell), and the models run on {device}; set DTYPE=auto"
            )
        return torch.bfloat16
    if name == INT8 and not on_cpu:
        raise StartupError(
            f"DTYPE=int8 is for CPUs, and the models run on {device}; set DTYPE=auto, or DEVICE=cpu"
        )
    if name == INT8 and not cpu_has_int8():
        raise StartupError(
            "DTYPE=int8 needs an x86 processor with AVX2, or an ARM processor with dot products on "
            "Linux; set DTYPE=auto"
        )
    if name in {"auto", INT8}:
        if on_cpu:
            return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
        if not qwen:
            return torch.float16
        native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if native else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    if on_cpu and dtype is torch.float16:
        raise StartupError("DTYPE=float16 is for GPUs; on a CPU use bfloat16, float32 or auto")
    return dtype


def has_float8(device: torch.device) -> bool:
    """Whether a GPU multiplies matrices in float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def cpu_has_bfloat16() -> bool:
    """Whether the processor has instructions for matrix products in bfloat16."""
    return _cpu_has_any("amx_bf16", "avx512_bf16", arm="bf16")


def cpu_has_int8() -> bool:
    """Whether the processor multiplies 8-bit matrices faster than those in float32."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and _cpu_has_any("avx2", arm="dot"))


def _cpu_has_any(*x86: str, arm: str) -> bool:
    """Whether the processor has one of these features; on ARM, PyTorch uses them only on Linux."""
    capabilities = torch.cpu.get_capabilities()
    names = (*x86, arm) if platform.system() == "Linux" else x86
    return any(capabilities.get(name) for name in names)


def describe_device(device: torch.device) -> str:
    """Return the name of the GPU, or the processor's name and number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capabilities = torch.cpu.get_capabilities()
    processor = capabilities.get("cpu_name") or capabilities.get("architecture") or "CPU"
    return f"{processor}, {available_threads()} threads"


def memory_bytes(device: torch.device) -> int | None:
    """Return the memory of a CUDA device in bytes; None for other devices."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def make_memory_freer(device: torch.device) -> Callable[[], None]:
    """Make a function that returns the device allocator's unused memory to the system."""

    def free() -> None:
        gc.collect()
        if device.type == "cuda":
            empty_cuda_cache()

    return free


def make_memory_reader(device: torch.device) -> Callable[[str], int] | None:
    """Make a function that returns a CUDA device's allocated, reserved, free or total bytes.

    Returns None for other devices.
    """
    if device.type != "cuda":
        return None
    readers: dict[str, Callable[[], int]] = {
        "allocated": lambda: torch.cuda.memory_allocated(device),
        "reserved": lambda: torch.cuda.memory_reserved(device),
        "free": lambda: torch.cuda.mem_get_info(device)[0],
        "total": lambda: torch.cuda.mem_get_info(device)[1],
    }
    return lambda kind: readers[kind]()


def empty_cuda_cache() -> None:
    """Return the unused memory of PyTorch's allocator to the driver; waits for a capture's end."""
    with capture_lock:
        torch.cuda.empty_cache()


@cache
def ensure_allocates(device: torch.device) -> None:
    """Test an allocation on a CUDA device, and turn expandable segments off if they fail.

    Expandable segments need calls that some drivers do not support (under WSL, on virtual GPUs),
    and NVML, which may be forbidden on a slice of a GPU (MIG).
    """
    if device.type != "cuda":
        return
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")  # noqa: SLF001
        torch.empty(1, device=device)
        log.warning("expandable_segments_refused", device=str(device), reason=reason)


def memory_usage(device: torch.device) -> MemoryUsage:
    """Return the usage of the memory in which models on this device are."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryUsage(total - free, total, torch.cuda.memory_reserved(device))
    if device.type == "mps":
        return MemoryUsage(torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory())
    machine = psutil.virtual_memory()
    process = psutil.Process().memory_info()
    # Without mapped files, which the system's figure for available memory leaves out, too.
    own = process.rss - getattr(process, "shared", 0)
    machine_usage = MemoryUsage(machine.total - machine.available, machine.total, own)
    group_usage = control_group_usage()
    if group_usage is None or group_usage.total >= machine_usage.total:
        return machine_usage
    return replace(group_usage, own=own)


def control_group_usage() -> MemoryUsage | None:
    """Return the usage of the control group with the least memory left; None without a limit.

    Control groups of version 1 and 2 are read.
    """
    usages = []
    for group in find_control_groups("memory"):
        texts = (read_system_file(group / f"memory.{name}") for name in ("max", "limit_in_bytes"))
        limit = next((int(text) for text in texts if text.strip().isdecimal()), _NO_LIMIT)
        if limit < _NO_LIMIT:
            lines = read_system_file(group / "memory.stat").splitlines()
            statistics = dict(line.partition(" ")[::2] for line in lines)
            names = next((names for names in _UNRECLAIMABLE if names & statistics.keys()), set())
            texts = (statistics.get(name, "") for name in names)
            usages.append(MemoryUsage(sum(int(text) for text in texts if text.isdecimal()), limit))
    return min(usages, key=lambda usage: usage.total - usage.used, default=None)


def host_memory_left() -> int:
    """Return the bytes that the process may still allocate in its machine or control group."""
    usage = memory_usage(torch.device("cpu"))
    return max(0, usage.total - usage.used)


def measure_peak_growth(run: Callable[[], object]) -> int | None:
    """Return the peak growth of the process's memory, in bytes, during `run`; None if not known.

    If the system cannot reset the peak, an earlier, higher peak counts.
    """
    with suppress(OSError):
        _RESET_PEAK.write_text("5", "ascii")
    before = psutil.Process().memory_info().rss
    run()
    found = re.search(r"^VmHWM:\s+(\d+) kB", read_system_file(_STATUS), re.MULTILINE)
    return None if found is None else max(0, int(found[1]) * 1024 - before)


def time_fastest_run(
    run: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of the fastest of up to three runs; the first one may compile."""
    durations: list[float] = []
    while len(durations) < _MAX_RUNS and sum(durations) < _LONG_SECONDS:
        began = clock()
        run()
        durations.append(clock() - began)
    return min(durations)

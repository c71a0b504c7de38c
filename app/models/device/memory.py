"""The usage of a device's memory, on a CPU that of the control group or of the machine."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil
import structlog
import torch

from app.engine.loaded_models import MemoryUsage
from app.models.device.control_groups import CGROUPS, MEMBERSHIP, groups_of, read_or_empty

log = structlog.get_logger(__name__)

# Held while a CUDA graph is captured: PyTorch's allocator cannot return memory meanwhile, and
# raises an error in any thread that wants it to.
capturing = threading.RLock()
# Memory that the system can reclaim only by swapping, in version 1 of control groups, which has an
# "shmem" too (of the group without its children), and in version 2.
_HELD = ({"total_rss", "total_shmem"}, {"anon", "shmem", "kernel"})
# In version 1 a larger number stands for no limit.
_NO_LIMIT = 1 << 60


def empty_cuda_cache() -> None:
    """Return memory that PyTorch's allocator does not use to the driver, after a capture's end."""
    with capturing:
        torch.cuda.empty_cache()


@cache
def ensure_allocates(device: torch.device) -> None:
    """Allocate on a CUDA device; where only expandable segments fail, go on without them.

    They need calls that some drivers do not support (under WSL, on virtual GPUs), and NVML, which
    may be forbidden on a slice of a GPU (MIG).
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
    """The usage of the memory that models on this device are in."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryUsage(total - free, total, torch.cuda.memory_reserved(device))
    if device.type == "mps":
        return MemoryUsage(torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory())
    machine = psutil.virtual_memory()
    process = psutil.Process().memory_info()
    # Mapped files count for nobody, as in what is available.
    own = process.rss - getattr(process, "shared", 0)
    whole = MemoryUsage(machine.total - machine.available, machine.total, own)
    limited = control_group_usage(CGROUPS, MEMBERSHIP)
    if limited is None or limited.total >= whole.total:
        return whole
    return replace(limited, own=own)


def control_group_usage(cgroups: Path, membership: Path) -> MemoryUsage | None:
    """The usage of the control group with the lowest limit, version 1 or 2; None without one."""
    usages = (_usage_of(group) for group in groups_of("memory", cgroups, membership))
    limited = [usage for usage in usages if usage is not None]
    return min(limited, key=lambda usage: usage.total, default=None)


def _usage_of(group: Path) -> MemoryUsage | None:
    limits = (read_or_empty(group / name) for name in ("memory.max", "memory.limit_in_bytes"))
    limit = next((int(text) for text in limits if text.strip().isdecimal()), _NO_LIMIT)
    if limit >= _NO_LIMIT:
        return None
    statistics = dict(_pairs(read_or_empty(group / "memory.stat")))
    names = next((names for names in _HELD if names & statistics.keys()), set())
    return MemoryUsage(sum(statistics.get(name, 0) for name in names), limit)


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            yield name, int(value)

"""Threads on the CPU: how many a forward should use, and threads of the lowest priority."""

import math
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from app.models.device.control_groups import CGROUPS, MEMBERSHIP, groups_of, read_or_empty

# With less work for each thread, waiting for each other costs more than it saves, as the threads
# share their cores with the event loop, the tokenizer and the clients.
_FLOP_WORTH_A_THREAD = 0.5e9
_LOWEST_PRIORITY = 19


@cache
def available_threads() -> int:
    """PyTorch's default number of threads, or fewer if a quota allows fewer CPUs.

    Threads beyond the quota would be halted in turn while the others wait for them. Cached, because
    `set_for` changes PyTorch's number.
    """
    quota = cpu_quota(CGROUPS, MEMBERSHIP)
    threads = torch.get_num_threads()
    return threads if quota is None else max(1, min(threads, int(quota)))


def cpu_quota(cgroups: Path, membership: Path) -> float | None:
    """The smallest quota in CPUs of the process's control groups, version 1 or 2; None without."""
    folders = groups_of("cpu", cgroups, membership)
    quotas = [quota for folder in folders if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _quota_of(group: Path) -> float | None:
    """CPUs that one control group may use."""
    both = read_or_empty(group / "cpu.max").split()
    if not both:
        both = [read_or_empty(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    try:
        quota, period = (int(value) for value in both)
    except ValueError:  # "max", or no such file.
        return None
    return quota / period if quota > 0 and period > 0 else None


class CpuThreads:
    """Sets the calling thread's number of intra-operation threads by the size of a batch.

    `fixed` is the number for every forward, where several workers share the cores: PyTorch's matrix
    library has one number for all threads of the process.
    """

    def __init__(self, parameters: int, fixed: int | None = None) -> None:
        self._flop_per_token = 2 * parameters
        self._least = fixed or 1
        self._most = fixed or available_threads()

    def choose(self, tokens: int) -> int:
        """The number of threads for a batch; at most PyTorch's default."""
        worth = math.ceil(tokens * self._flop_per_token / _FLOP_WORTH_A_THREAD)
        return max(self._least, min(self._most, worth))

    def set_for(self, tokens: int) -> None:
        """Apply `choose` to the thread that calls this."""
        threads = self.choose(tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


def leave_processor_to_others() -> None:
    """Give the calling thread the lowest priority, on Linux."""
    if sys.platform == "linux":  # Elsewhere this would change the whole process.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)

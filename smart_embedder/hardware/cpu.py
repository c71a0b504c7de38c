"""The CPU: how many threads a forward gets, how workers share the cores, memory in large pages."""

import math
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from smart_embedder.errors import StartupError

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")
# With less work for each thread, synchronisation costs more than a further thread saves, as threads
# share their cores with the event loop, the tokenizer and the clients.
_FLOP_PER_THREAD = 0.5e9
# The nice value of background threads: beside a busy program they get a third of its processor
# time. With the lowest priority, 19, it would be a seventieth, and a model would never be loaded.
_LOW_PRIORITY = 5

Result = TypeVar("Result")


def empty_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialised tensor on the host in large pages.

    For tensors so large that PyTorch's allocator asks the system for new memory each time. NumPy
    asks for large pages; the first pass over new small pages takes four times as long.
    """
    return torch.from_numpy(np.empty(shape, f"u{dtype.itemsize}")).view(dtype)


class LargePages:
    """Copies tensors that are read from end to end again and again, as weights are, to large pages.

    In pages of 4 KiB a forward of few tokens takes a tenth longer, and on one core up to a half,
    because prefetches wait for the address of the next page. Small tensors share a stretch of
    memory, since each may be smaller than a page of 2 MiB. The stretch is freed with the last of
    them.
    """

    _PAGE, _STRETCH, _ALIGNMENT = 2**21, 2**24, 64

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """Make a copy without gaps, aligned to 64 bytes."""
        size = -(-tensor.nbytes // self._ALIGNMENT) * self._ALIGNMENT
        if 2 * size >= self._STRETCH:
            memory = self._allocate(size)
        else:
            if size > len(self._rest):
                self._rest = self._allocate(self._STRETCH)
            memory, self._rest = self._rest[:size], self._rest[size:]
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _allocate(self, size: int) -> Tensor:
        memory = mmap.mmap(-1, size + self._PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel without large pages raises an error; the memory then has small ones.
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        stretch = torch.frombuffer(memory, dtype=torch.uint8)
        start = -stretch.data_ptr() % self._PAGE
        return stretch[start : start + size]


def cat_in_large_pages(parts: Iterable[Tensor], total: int, dim: int = 0) -> Tensor:
    """Concatenate as `torch.cat` does, but copy each part while it is in the cache.

    There is at least one part, and the sum of their lengths is `total`.
    """
    rest = iter(parts)
    first = next(rest)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    output, start = empty_in_large_pages(shape, first.dtype), 0
    for part in chain([first], rest):
        output.narrow(dim, start, part.shape[dim]).copy_(part)
        start += part.shape[dim]
    return output


@cache
def available_threads() -> int:
    """Return PyTorch's default number of threads, or fewer if a quota allows fewer CPUs.

    The system would halt threads beyond the quota while the others wait for them. Cached, because
    `set_threads` changes PyTorch's number.
    """
    quota = cpu_quota()
    threads = torch.get_num_threads()
    return threads if quota is None else max(1, min(threads, int(quota)))


def cpu_quota() -> float | None:
    """Return the smallest quota, in CPUs, of the process's control groups; None if there is none.

    Control groups of version 1 and 2 are read.
    """
    quotas = []
    for group in find_control_groups("cpu"):
        values = read_system_file(group / "cpu.max").split() or [
            read_system_file(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        with suppress(ValueError):  # The quota is "max", or there is no such file.
            quota, period = map(int, values)
            if quota > 0 and period > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def set_threads(flop: float, fixed: int | None = None) -> None:
    """Set PyTorch's number of threads for a forward of `flop` operations in the calling thread.

    If several workers share the cores, `fixed` is the number for every forward, because PyTorch's
    matrix library has one number for the whole process.
    """
    threads = fixed or max(1, min(available_threads(), math.ceil(flop / _FLOP_PER_THREAD)))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class CpuShare:
    """A worker's share of the machine: its memory node, its CPUs, and its number of threads.

    `cpus` is empty on systems that cannot bind threads to CPUs.
    """

    name: str
    node: int
    cpus: frozenset[int]
    threads: int

    def bind_thread(self) -> None:
        """Bind the calling thread, and the threads that it starts, to these CPUs.

        PyTorch's pool of threads is started by the thread that computes, so it is bound, too. The
        system then allocates memory on the node of these CPUs.
        """
        if self.cpus and sys.platform == "linux":
            with suppress(OSError):  # A CPU may have been removed meanwhile.
                os.sched_setaffinity(0, self.cpus)

    def run(self, call: Callable[[], Result]) -> Result:
        """Run `call` in a thread that is bound to these CPUs, and return its result."""
        with ThreadPoolExecutor(1, initializer=self.bind_thread) as executor:
            return executor.submit(call).result()


def share_cpus(names: Sequence[str]) -> list[CpuShare]:
    """Divide the CPUs among workers; raises `StartupError` for more workers than cores.

    All get the same number of threads, because PyTorch's matrix library has one number for the
    whole process.
    """
    available = available_threads()
    if len(names) > available:
        raise StartupError(
            f"DEVICE={','.join(names)} names {len(names)} workers, and this process may use "
            f"{available} of the machine's cores: name at most {available}"
        )
    parts = divide_cpus(_list_cpus_by_node(), len(names))
    threads = min([available // len(names), *(len(part) for _, part in parts if part)])
    return [
        CpuShare(name, node, frozenset(part), threads)
        for name, (node, part) in zip(names, parts, strict=True)
    ]


def _list_cpus_by_node() -> list[list[int]]:
    """List the CPUs that the process may use, by memory node, with a core's CPUs side by side."""
    if sys.platform != "linux":
        return [[]]

    def core_and_cpu(cpu: int) -> tuple[int, int]:
        core = read_system_file(_CPUS / f"cpu{cpu}" / "topology" / "core_id").strip()
        return int(core) if core.isdigit() else cpu, cpu

    usable = os.sched_getaffinity(0)
    nodes = []
    for folder in sorted(_NODES.glob("node[0-9]*")):
        cpus = usable.intersection(parse_cpu_list(read_system_file(folder / "cpulist")))
        if cpus:
            nodes.append(cpus)
    return [sorted(cpus, key=core_and_cpu) for cpus in nodes or [usable]]


def parse_cpu_list(text: str) -> Iterable[int]:
    """Parse a list of CPUs in the kernel's format, such as `0-3,8`."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def divide_cpus(nodes: Sequence[Sequence[int]], workers: int) -> list[tuple[int, list[int]]]:
    """Return the node and the CPUs of each worker, which are neighbours in their node.

    If there are fewer workers than nodes, a worker may get CPUs of several nodes.
    """
    if workers < len(nodes):
        return list(enumerate(_split_evenly([cpu for node in nodes for cpu in node], workers)))
    counts = [1] * len(nodes)
    for _ in range(workers - len(nodes)):
        fullest = max(range(len(nodes)), key=lambda node: len(nodes[node]) / counts[node])
        counts[fullest] += 1
    return [
        (node, part)
        for node, count in enumerate(counts)
        for part in _split_evenly(nodes[node], count)
    ]


def _split_evenly(cpus: Sequence[int], parts: int) -> list[list[int]]:
    """Divide a list into `parts` runs of lengths as equal as possible."""
    borders = [len(cpus) * part // parts for part in range(parts + 1)]
    return [list(cpus[start:stop]) for start, stop in pairwise(borders)]


def lower_thread_priority() -> None:
    """Give the calling thread a lower priority on Linux; do nothing elsewhere."""
    if sys.platform == "linux":  # On other systems this would change the whole process.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


def find_control_groups(controller: str) -> set[Path]:
    """Return the folders of the process's control groups for a controller, with their parents.

    Both versions of control groups are supported.
    """
    folders = {_CGROUPS, _CGROUPS / controller}
    for line in read_system_file(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = _CGROUPS / controller if controllers else _CGROUPS
            group = root / path.strip("/")
            folders |= {group, *group.parents} if group.is_relative_to(root) else set()
    return folders


def read_system_file(path: Path) -> str:
    """Read a system file; return an empty text if there is no such file."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return ""

"""The cores that the process may use, and memory in large pages.

How many threads a forward is worth, and what workers share of the cores.
"""

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
# With less work for each thread, waiting for each other costs more than it saves, as the threads
# share their cores with the event loop, the tokenizer and the clients.
_FLOP_WORTH_A_THREAD = 0.5e9
# Of threads that make way: the share of a processor that others leave is a third of theirs. The
# lowest, 19, is a seventieth: beside busy programs a model would never be loaded.
_LOW_PRIORITY = 5

Result = TypeVar("Result")


def empty_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the host, for what PyTorch's allocator takes anew each time.

    NumPy asks the system for large pages; the first pass over new small ones takes four times as
    long.
    """
    return torch.from_numpy(np.empty(shape, f"u{dtype.itemsize}")).view(dtype)


class LargePages:
    """Memory for what is read from end to end again and again, as weights are.

    In pages of 4 KiB a forward of few tokens takes a tenth longer, and on one core up to a half:
    prefetches wait until it is found where the next page lies. Small tensors share a stretch of
    memory, as a page of 2 MiB may be larger than each; it is free when none of them is left.
    """

    _PAGE, _STRETCH, _ALIGNMENT = 2**21, 2**24, 64

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy without gaps, aligned to 64 bytes."""
        size = -(-tensor.nbytes // self._ALIGNMENT) * self._ALIGNMENT
        if 2 * size >= self._STRETCH:
            memory = self._mapped(size)
        else:
            if size > len(self._rest):
                self._rest = self._mapped(self._STRETCH)
            memory, self._rest = self._rest[:size], self._rest[size:]
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _mapped(self, size: int) -> Tensor:
        memory = mmap.mmap(-1, size + self._PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel without large pages refuses; the memory is good without them.
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        stretch = torch.frombuffer(memory, dtype=torch.uint8)
        start = -stretch.data_ptr() % self._PAGE
        return stretch[start : start + size]


def cat_in_large_pages(parts: Iterable[Tensor], total: int, dim: int = 0) -> Tensor:
    """As `torch.cat`, each part copied as it comes, while it is in the cache.

    There is at least one, and all parts together are `total` long.
    """
    rest = iter(parts)
    part = next(rest)
    shape = (*part.shape[:dim], total, *part.shape[dim + 1 :])
    output, start = empty_in_large_pages(shape, part.dtype), 0
    for each in chain([part], rest):
        output.narrow(dim, start, each.shape[dim]).copy_(each)
        start += each.shape[dim]
    return output


@cache
def available_threads() -> int:
    """PyTorch's default number of threads, or fewer if a quota allows fewer CPUs.

    Threads beyond the quota would be halted in turn while the others wait for them. Cached, because
    `set_threads` changes PyTorch's number.
    """
    quota = cpu_quota()
    threads = torch.get_num_threads()
    return threads if quota is None else max(1, min(threads, int(quota)))


def cpu_quota() -> float | None:
    """The smallest quota in CPUs of the process's control groups, version 1 or 2; None without."""
    quotas = []
    for group in find_control_groups("cpu"):
        both = read_system_file(group / "cpu.max").split() or [
            read_system_file(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        with suppress(ValueError):  # "max", or no such file.
            quota, period = (int(value) for value in both)
            if quota > 0 and period > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def set_threads(flop: float, fixed: int | None = None) -> None:
    """Set the calling thread's number of intra-operation threads to what a forward is worth.

    `fixed` is the number for every forward, where several workers share the cores: PyTorch's matrix
    library has one number for all threads of the process.
    """
    threads = fixed or max(1, min(available_threads(), math.ceil(flop / _FLOP_WORTH_A_THREAD)))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class CpuShare:
    """The share of the worker `name`: `cpus` of the memory node `node`, and a number of threads.

    `cpus` is empty on systems that cannot bind threads to CPUs.
    """

    name: str
    node: int
    cpus: frozenset[int]
    threads: int

    def bind_thread(self) -> None:
        """Bind the calling thread, and those that it starts, to these CPUs.

        Each thread that computes starts a pool of PyTorch's. The system gives a thread memory of
        the node on which it runs.
        """
        if self.cpus and sys.platform == "linux":
            with suppress(OSError):  # A CPU may have been taken away meanwhile.
                os.sched_setaffinity(0, self.cpus)

    def run(self, call: Callable[[], Result]) -> Result:
        """Run `call` on a thread that is bound to these CPUs; return its result."""
        with ThreadPoolExecutor(1, initializer=self.bind_thread) as executor:
            return executor.submit(call).result()


def share_cpus(names: Sequence[str]) -> list[CpuShare]:
    """A share for each worker; raises `StartupError` where there are more of them than cores.

    All have the same number of threads, of which PyTorch's matrix library has one for the process.
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
    """The CPUs that the process may use, node by node, the threads of one core side by side."""
    if sys.platform != "linux":
        return [[]]

    def core_and_cpu(cpu: int) -> tuple[int, int]:
        core = read_system_file(_CPUS / f"cpu{cpu}" / "topology" / "core_id").strip()
        return int(core) if core.isdigit() else cpu, cpu

    usable = os.sched_getaffinity(0)
    lists = [read_system_file(node / "cpulist") for node in sorted(_NODES.glob("node[0-9]*"))]
    found = [node for each in lists if (node := usable.intersection(parse_cpu_list(each)))]
    return [sorted(node, key=core_and_cpu) for node in found or [usable]]


def parse_cpu_list(text: str) -> Iterable[int]:
    """The numbers in a list of the kernel's, such as `0-3,8`."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def divide_cpus(nodes: Sequence[Sequence[int]], workers: int) -> list[tuple[int, list[int]]]:
    """Node and CPUs of each worker; CPUs that are neighbours in a node stay together.

    No worker is on two nodes unless there are fewer workers than nodes.
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
    """`parts` runs of lengths as equal as possible."""
    borders = [len(cpus) * part // parts for part in range(parts + 1)]
    return [list(cpus[start:stop]) for start, stop in pairwise(borders)]


def lower_thread_priority() -> None:
    """Give the calling thread a lower priority, on Linux."""
    if sys.platform == "linux":  # Elsewhere this would change the whole process.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


def find_control_groups(controller: str) -> set[Path]:
    """The folders of the process's groups for a controller, of version 1 or 2, and those above."""
    folders = {_CGROUPS, _CGROUPS / controller}
    for line in read_system_file(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = _CGROUPS / controller if controllers else _CGROUPS
            group = root / path.strip("/")
            folders |= {group, *group.parents} if group.is_relative_to(root) else set()
    return folders


def read_system_file(path: Path) -> str:
    """The text of a system file; empty if there is no such file."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return ""

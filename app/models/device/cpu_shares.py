"""Divides the cores between several workers on the CPU, each on one memory node."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from app.errors import StartupError
from app.models.device.control_groups import read_or_empty
from app.models.device.cpu_threads import available_threads

Result = TypeVar("Result")

_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")


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


def share_cpus(names: Sequence[str], nodes: Path = _NODES, cpus: Path = _CPUS) -> list[CpuShare]:
    """A share for each worker; raises `StartupError` where there are more of them than cores.

    All have the same number of threads, of which PyTorch's matrix library has one for the process.
    """
    available = available_threads()
    if len(names) > available:
        raise StartupError(
            f"DEVICE={','.join(names)} names {len(names)} workers, and this process may use "
            f"{available} of the machine's cores: name at most {available}"
        )
    parts = divide(_by_node(nodes, cpus), len(names))
    threads = min([available // len(names), *(len(part) for _, part in parts if part)])
    return [
        CpuShare(name, node, frozenset(part), threads)
        for name, (node, part) in zip(names, parts, strict=True)
    ]


def divide(nodes: Sequence[Sequence[int]], workers: int) -> list[tuple[int, list[int]]]:
    """Node and CPUs of each worker; CPUs that are neighbours in a node stay together.

    No worker is on two nodes unless there are fewer workers than nodes.
    """
    if workers < len(nodes):
        return list(enumerate(_cut([cpu for node in nodes for cpu in node], workers)))
    counts = [1] * len(nodes)
    for _ in range(workers - len(nodes)):
        fullest = max(range(len(nodes)), key=lambda node: len(nodes[node]) / counts[node])
        counts[fullest] += 1
    return [(node, part) for node, count in enumerate(counts) for part in _cut(nodes[node], count)]


def _cut(cpus: Sequence[int], parts: int) -> list[list[int]]:
    """`parts` runs of lengths as equal as possible."""
    borders = [len(cpus) * part // parts for part in range(parts + 1)]
    return [list(cpus[start:stop]) for start, stop in pairwise(borders)]


def _by_node(nodes: Path, cpus: Path) -> list[list[int]]:
    """The CPUs that the process may use, node by node, the threads of one core side by side."""
    if sys.platform != "linux":
        return [[]]
    usable = os.sched_getaffinity(0)
    lists = [read_or_empty(node / "cpulist") for node in sorted(nodes.glob("node[0-9]*"))]
    found = [node for each in lists if (node := usable.intersection(parse_cpu_list(each)))]
    return [sorted(node, key=lambda cpu: _core(cpus, cpu)) for node in found or [usable]]


def parse_cpu_list(text: str) -> Iterable[int]:
    """The numbers in a list of the kernel's, such as `0-3,8`."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _core(cpus: Path, cpu: int) -> tuple[int, int]:
    """The core of a CPU and the CPU itself, by which they are sorted."""
    core = read_or_empty(cpus / f"cpu{cpu}" / "topology" / "core_id").strip()
    return int(core) if core.isdigit() else cpu, cpu

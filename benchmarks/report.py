"""One run of the comparison as a whole: what was measured where, and its rows."""

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.figures import Row, Work
from benchmarks.table import format_table
from smart_embedder import __version__


@dataclass(frozen=True, slots=True)
class Report:
    """The JSON file holds these fields under these names."""

    workload: str
    texts: int
    tokens: int
    longest: int
    gflop: float
    ceilings_gflop_per_second: dict[str, float]
    machine: str
    smart_embedder: str
    engines: list[Row]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def as_text(self, *, latencies: bool) -> str:
        """For people: what was measured, on what, and the table."""
        rates = self.ceilings_gflop_per_second.items()
        ceilings = ", ".join(f"{name} {rate:.0f}" for name, rate in rates)
        return "\n".join(
            [
                self._size(),
                self.machine,
                f"matrix ceilings in GFLOP/s: {ceilings}",
                "",
                format_table(self.engines, latencies=latencies),
            ]
        )

    def _size(self) -> str:
        longest = f"the longest {self.longest}"
        return (
            f"{self.workload}: {self.texts} texts, {self.tokens} tokens, {longest}; "
            f"{self.gflop:.0f} GFLOP"
        )


def make_report(workload: str, work: Work, ceilings: dict[str, float], rows: list[Row]) -> Report:
    """`ceilings` in FLOP/s."""
    return Report(
        workload=workload,
        texts=len(work.lengths),
        tokens=sum(work.lengths),
        longest=max(work.lengths),
        gflop=work.encoder.flop(work.lengths) / 1e9,
        ceilings_gflop_per_second={name: rate / 1e9 for name, rate in ceilings.items()},
        machine=_machine(),
        smart_embedder=__version__,
        engines=rows,
    )


def _machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())

"""One report of this engine on a machine's GPU: correctness first, then speed and memory.

    python -m benchmarks.gpu.report OUT --device cuda
    python -m benchmarks.gpu.report OUT --only 'checkpoint bge-m3,tests,engines'

Each section is a process with its own time limit; one that fails is a line of the report and does
not end it. Writes `OUT/report.json` and `OUT/report.md`. Checkpoints of full size with random
weights are saved in `OUT/models` and can be used again.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from smart_embedder.hardware.device import choose_device, describe_device
from tools.demo.package import PACKAGE
from tools.table import markdown

_ROOT = Path(__file__).parents[2]
# For all sections together; what comes last is left out where it is over.
_SECONDS = 520.0
_LAST_LINES = 40
# For bge-m3 on an H200, texts of 256 tokens: tokens a second, a share of them, or milliseconds.
_AIMED_LENGTH = 256
AIMS = {
    "dense": 800_000,
    "dense, float8": 1_300_000,
    "all kinds": 400_000,
    "HTTP of dense": 0.85,
    "lone query, ms": 2.0,
}


@dataclass(frozen=True, slots=True)
class Section:
    """A program, and at most how many seconds it may take; `figures` if it prints JSON."""

    name: str
    command: list[str]
    seconds: float
    environment: dict[str, str]
    figures: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a section: its `figures`, or the end of what it said."""

    name: str
    seconds: float
    status: int | None
    figures: Any
    said: str


def sections(out: Path, device: str, *, quick: bool) -> Iterator[Section]:
    """Yield the sections, the most important first, because the time limit may cut the last."""
    models = {name: out / "models" / name for name in ("bge-m3", "qwen-reranker")}
    if quick:
        models = {"bge-m3": out / "models" / "two-layer"}
    hurry = ["--quick"] if quick else []

    def measured(name: str, section: str, model: str, seconds: float) -> Section:
        command = [sys.executable, "-m", "benchmarks.gpu.sections", section, str(models[model])]
        return Section(name, [*command, "--device", device, *hurry], seconds, {})

    def checkpoint(path: Path) -> Section:
        command = [sys.executable, "-m", "benchmarks.checkpoints", path.name, str(path)]
        return Section(f"checkpoint {path.name}", command, 90.0, {}, figures=False)

    yield checkpoint(models["bge-m3"])
    # The modules that have any: collecting all others takes longer than running these.
    modules = (_ROOT / "tests").rglob("test_*.py")
    with_any = [str(each) for each in modules if "pytest.mark.device" in each.read_text("utf-8")]
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "device", *with_any]
    # A module that cannot be imported there costs its own tests alone.
    tests += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    if find_spec(PACKAGE) is None:  # It is too large to be carried everywhere.
        tests += ["-k", "not demo_checkpoint"]
    yield Section("tests", tests, 120.0, {}, figures=False)
    verify = {"EMBEDDING_MODEL": str(models["bge-m3"]), "DEVICE": device}
    verify["RERANKER_MODEL"] = "late-interaction"
    yield Section("verify", [sys.executable, "-m", "tools.verify"], 120.0, verify, figures=False)
    yield measured("kernels embedder", "kernels", "bge-m3", 60.0)
    yield measured("engines", "engines", "bge-m3", 200.0)
    yield measured("http_rate", "http-rate", "bge-m3", 90.0)
    if device != "cpu":
        float8 = measured("float8", "rate", "bge-m3", 60.0)
        yield replace(float8, command=[*float8.command, "--dtype", "float8"])
    if "qwen-reranker" in models:
        yield checkpoint(models["qwen-reranker"])
        yield measured("kernels reranker", "reranker-kernels", "qwen-reranker", 60.0)


def run(section: Section, seconds: float) -> Outcome:
    """Run one, for at most so many seconds."""
    began = time.monotonic()
    status: int | None = None
    with subprocess.Popen(
        section.command,
        cwd=_ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | section.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            # With its own processes, such as a service, which would disturb the next section.
            os.killpg(process.pid, signal.SIGKILL)
            printed, errors = process.communicate()
            errors += f"\nended after {seconds:.0f} seconds"
    said = printed + errors
    figures = None
    if section.figures and status == 0:
        # The JSON of the last line that is any: libraries may print, too.
        found = [line for line in printed.splitlines() if line.startswith(("{", "["))]
        figures = json.loads(found[-1]) if found else None
    last = "\n".join(said.strip().splitlines()[-_LAST_LINES:])
    return Outcome(section.name, round(time.monotonic() - began, 1), status, figures, last)


def machine() -> dict[str, object]:
    """What the machine is."""
    found: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "device": describe_device(choose_device("auto")),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
        }
    return found


def compared(outcomes: list[Outcome]) -> Iterator[tuple[str, float, float]]:
    """Yield name, figure and aim of each measurement."""
    found = {each.name: each.figures for each in outcomes if each.figures}

    def rate(section: str, kinds: str = "dense") -> float | None:
        wanted = {"tokens": _AIMED_LENGTH, "kinds": kinds}.items()
        rows = found.get(section, {}).get("rates", ())
        fitting = (each for each in rows if wanted <= each.items())
        return next((each["tokens_per_second"] for each in fitting), None)

    dense, over_http = rate("engines"), found.get("http_rate", {}).get("tokens_per_second")
    measured = {
        "dense": dense,
        "dense, float8": rate("float8"),
        "all kinds": rate("engines", "all kinds"),
        "HTTP of dense": over_http and dense and over_http / dense,
        "lone query, ms": found.get("engines", {}).get("lone_query", {}).get("p50_ms"),
    }
    yield from ((name, each, AIMS[name]) for name, each in measured.items() if each is not None)


def page(outcomes: list[Outcome]) -> str:
    """Tables of what was measured, then what the sections said that failed."""
    parts = ["# GPU report", "## Sections"]
    verdicts = {0: "ok", None: "**not finished**"}
    rows = (
        (each.name, verdicts.get(each.status, f"**failed** ({each.status})"), each.seconds)
        for each in outcomes
    )
    parts.append(markdown(("section", "result", "seconds"), rows))
    beside = [(name, _cell(own), _cell(other)) for name, own, other in compared(outcomes)]
    if beside:
        parts += ["## Aims", markdown(("texts of 256 tokens", "measured", "beside"), beside)]
    for each in outcomes:
        if each.figures:
            parts.append(f"## {each.name.replace('_', ' ').capitalize()}")
            parts += _tables(each.figures)
        if each.name in {"tests", "verify"} or each.status != 0:
            parts.append(f"## {each.name}\n\n```text\n{each.said}\n```")
    return "\n\n".join(parts) + "\n"


def _tables(figures: Any) -> Iterator[str]:
    """A list of records is a table, and so are the plain figures of a record; others follow it."""
    if isinstance(figures, list):
        heads = list(figures[0])
        yield markdown(heads, ([_cell(row.get(head, "")) for head in heads] for row in figures))
        return
    nested = {name: each for name, each in figures.items() if _holds_records(each)}
    plain = [(name, _cell(each)) for name, each in figures.items() if name not in nested]
    if plain:
        yield markdown(("figure", "value"), plain)
    for name, each in nested.items():
        yield f"### {name.replace('_', ' ').capitalize()}"
        yield from _tables(each)


def _holds_records(figures: Any) -> bool:
    if isinstance(figures, list):
        return bool(figures) and isinstance(figures[0], dict)
    return isinstance(figures, dict) and any(map(_holds_records, figures.values()))


def _cell(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def report(
    out: Path,
    device: str,
    *,
    quick: bool,
    only: Collection[str] = (),
) -> list[Outcome]:
    """Run the sections, or only those of some names.

    Both files are written anew after each, in case the machine goes away.
    """
    ends = time.monotonic() + _SECONDS
    outcomes = [Outcome("machine", 0.0, 0, machine(), "")]
    for section in sections(out, device, quick=quick):
        if only and section.name not in only:
            continue
        left = ends - time.monotonic()
        if left < 1:
            outcomes.append(Outcome(section.name, 0.0, None, None, "left out: the time was over"))
            continue
        print(f"{section.name} ...", flush=True)
        outcomes.append(run(section, min(left, section.seconds)))
        print(f"  {outcomes[-1].seconds} s, status {outcomes[-1].status}", flush=True)
        found = [asdict(each) for each in outcomes]
        (out / "report.json").write_text(json.dumps(found, indent=2) + "\n", "utf-8")
        (out / "report.md").write_text(page(outcomes), "utf-8")
    return outcomes


def main() -> int:
    """Write the report; 1 if a section failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the report and the checkpoints")
    parser.add_argument("--device", default="cuda", help="or cpu, to rehearse")
    parser.add_argument("--quick", action="store_true", help="a small model and few short texts")
    parser.add_argument("--only", default="", help="names of sections, as in the report, by commas")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    only = list(filter(None, arguments.only.split(",")))
    names = [section.name for section in sections(out, arguments.device, quick=arguments.quick)]
    if unknown := sorted({*only} - {*names}):
        parser.error(f"there is no section {unknown[0]}; there are: {', '.join(names)}")
    (out / "models").mkdir(parents=True, exist_ok=True)
    outcomes = report(out, arguments.device, quick=arguments.quick, only=only)
    print(f"{out / 'report.md'}")
    return 0 if all(each.status == 0 for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

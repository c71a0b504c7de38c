"""Write a report of this engine on a machine's GPU: correctness first, then speed and memory.

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
# For all sections together; the last ones are left out when it is over.
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
    """A program with a time limit; `figures` is set if it prints JSON."""

    name: str
    command: list[str]
    seconds: float
    environment: dict[str, str]
    figures: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a section: its `figures`, and the last lines of its output."""

    name: str
    seconds: float
    status: int | None
    figures: Any
    output: str


def sections(out: Path, device: str, *, quick: bool) -> Iterator[Section]:
    """Yield the sections, the most important first, because the time limit may cut the last."""
    model = out / "models" / ("two-layer" if quick else "bge-m3")
    options = ["--device", device, *(["--quick"] if quick else [])]

    def measurement(name: str, section: str, seconds: float) -> Section:
        command = [sys.executable, "-m", "benchmarks.gpu.sections", section, str(model)]
        return Section(name, [*command, *options], seconds, {})

    save = [sys.executable, "-m", "benchmarks.checkpoints", model.name, str(model)]
    yield Section(f"checkpoint {model.name}", save, 90.0, {}, figures=False)
    # Only modules with such tests, because collecting the others takes longer than these tests.
    modules = [
        str(path)
        for path in (_ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.device" in path.read_text("utf-8")
    ]
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "device", *modules]
    # A module that cannot be imported must not stop the others.
    tests += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    if find_spec(PACKAGE) is None:  # The demo's package is too large to copy to every machine.
        tests += ["-k", "not demo_checkpoint"]
    yield Section("tests", tests, 120.0, {}, figures=False)
    verify = {"EMBEDDING_MODEL": str(model), "DEVICE": device, "RERANKER_MODEL": "late-interaction"}
    yield Section("verify", [sys.executable, "-m", "tools.verify"], 120.0, verify, figures=False)
    yield measurement("kernels", "kernels", 60.0)
    yield measurement("engines", "engines", 200.0)
    yield measurement("http_rate", "http-rate", 90.0)
    if device != "cpu":
        float8 = measurement("float8", "rate", 60.0)
        yield replace(float8, command=[*float8.command, "--dtype", "float8"])


def run(section: Section, seconds: float) -> Outcome:
    """Run a section for at most `seconds`."""
    started = time.monotonic()
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
            # Its process group, too: a service would disturb the next section.
            os.killpg(process.pid, signal.SIGKILL)
            printed, errors = process.communicate()
            errors += f"\nended after {seconds:.0f} seconds"
    figures = None
    if section.figures and status == 0:
        # The last line of JSON, because libraries may print, too.
        lines = [line for line in printed.splitlines() if line.startswith(("{", "["))]
        figures = json.loads(lines[-1]) if lines else None
    last = "\n".join((printed + errors).strip().splitlines()[-_LAST_LINES:])
    return Outcome(section.name, round(time.monotonic() - started, 1), status, figures, last)


def describe_machine() -> dict[str, object]:
    """Describe the machine: Python, PyTorch, CPUs and GPU."""
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "device": describe_device(choose_device("auto")),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
        }
    return facts


def compare_with_aims(outcomes: list[Outcome]) -> Iterator[tuple[str, float, float]]:
    """Yield name, figure and aim of each measurement."""
    figures = {outcome.name: outcome.figures for outcome in outcomes if outcome.figures}

    def rate(section: str, kinds: str = "dense") -> float | None:
        case = {"tokens": _AIMED_LENGTH, "kinds": kinds}.items()
        rows = figures.get(section, {}).get("rates", ())
        return next((row["tokens_per_second"] for row in rows if case <= row.items()), None)

    dense, over_http = rate("engines"), figures.get("http_rate", {}).get("tokens_per_second")
    measured = {
        "dense": dense,
        "dense, float8": rate("float8"),
        "all kinds": rate("engines", "all kinds"),
        "HTTP of dense": over_http and dense and over_http / dense,
        "lone query, ms": figures.get("engines", {}).get("lone_query", {}).get("p50_ms"),
    }
    for name, figure in measured.items():
        if figure is not None:
            yield name, figure, AIMS[name]


def render_page(outcomes: list[Outcome]) -> str:
    """Render tables of the figures, and the output of the tests and of failed sections."""
    parts = ["# GPU report", "## Sections"]
    verdicts = {0: "ok", None: "**not finished**"}
    rows = (
        (
            section.name,
            verdicts.get(section.status, f"**failed** ({section.status})"),
            section.seconds,
        )
        for section in outcomes
    )
    parts.append(markdown(("section", "result", "seconds"), rows))
    aims = [
        (name, _format(figure), _format(aim)) for name, figure, aim in compare_with_aims(outcomes)
    ]
    if aims:
        parts += ["## Aims", markdown(("texts of 256 tokens", "measured", "aim"), aims)]
    for outcome in outcomes:
        if outcome.figures:
            parts.append(f"## {outcome.name.replace('_', ' ').capitalize()}")
            parts += _render_tables(outcome.figures)
        if outcome.name in {"tests", "verify"} or outcome.status != 0:
            parts.append(f"## {outcome.name}\n\n```text\n{outcome.output}\n```")
    return "\n\n".join(parts) + "\n"


def _render_tables(figures: Any) -> Iterator[str]:
    """Render a list of records as a table; of a record its plain values, then nested tables."""
    if isinstance(figures, list):
        heads = list(figures[0])
        yield markdown(heads, ([_format(row.get(head, "")) for head in heads] for row in figures))
        return
    nested = {name: value for name, value in figures.items() if _has_records(value)}
    plain = [(name, _format(value)) for name, value in figures.items() if name not in nested]
    if plain:
        yield markdown(("figure", "value"), plain)
    for name, value in nested.items():
        yield f"### {name.replace('_', ' ').capitalize()}"
        yield from _render_tables(value)


def _has_records(figures: Any) -> bool:
    if isinstance(figures, list):
        return bool(figures) and isinstance(figures[0], dict)
    return isinstance(figures, dict) and any(map(_has_records, figures.values()))


def _format(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def report(out: Path, device: str, *, quick: bool, only: Collection[str] = ()) -> list[Outcome]:
    """Run all sections, or those in `only`; write both files after each section."""
    end = time.monotonic() + _SECONDS
    outcomes = [Outcome("machine", 0.0, 0, describe_machine(), "")]
    for section in sections(out, device, quick=quick):
        if only and section.name not in only:
            continue
        left = end - time.monotonic()
        if left < 1:
            outcomes.append(Outcome(section.name, 0.0, None, None, "left out: the time was over"))
            continue
        print(f"{section.name} ...", flush=True)
        outcomes.append(run(section, min(left, section.seconds)))
        print(f"  {outcomes[-1].seconds} s, status {outcomes[-1].status}", flush=True)
        content = [asdict(outcome) for outcome in outcomes]
        (out / "report.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        (out / "report.md").write_text(render_page(outcomes), "utf-8")
    return outcomes


def main() -> int:
    """Write the report; return 1 if a section failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the report and the checkpoints")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the report")
    parser.add_argument("--quick", action="store_true", help="a small model and few short texts")
    parser.add_argument("--only", default="", help="comma-separated names of sections")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    only = list(filter(None, arguments.only.split(",")))
    names = [section.name for section in sections(out, arguments.device, quick=arguments.quick)]
    if unknown := sorted({*only} - {*names}):
        parser.error(f"there is no section {unknown[0]}; there are: {', '.join(names)}")
    (out / "models").mkdir(parents=True, exist_ok=True)
    outcomes = report(out, arguments.device, quick=arguments.quick, only=only)
    print(f"{out / 'report.md'}")
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Compare this engine with its peers on the same files and texts, each in its own process.

    python -m benchmarks.engines FOLDER                      # every engine, texts of mixed lengths
    python -m benchmarks.engines FOLDER --workloads queries --limit avx2
    python -m benchmarks.engines FOLDER --page               # docs/throughput.md: 25 minutes
    python -m benchmarks.engines FOLDER --page --limit avx2  # adds engines that are limited
    python -m benchmarks.engines --page                      # only writes the tables again

FOLDER is a checkpoint of bge-m3's shape; if it is missing, one with random weights is saved there.
The first run installs the peers' packages into their own environments. Only one engine is in memory
at a time.

For the page, the start, load and neighbours are measured, too. Figures are saved in
benchmarks/figures.json after each turn. A later run continues where one stopped, if machine, code
and texts are the same; otherwise it starts from the beginning.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from benchmarks import neighbours, page, start
from benchmarks.checkpoints import save_bge_m3, save_two_layers
from benchmarks.comparison import CATALOGUE, ENVIRONMENTS, Outcome, Plan, compare
from benchmarks.worker import LIMITS
from benchmarks.workload import WORKLOADS, draw_texts
from smart_embedder import __version__
from smart_embedder.kernels.build import (
    arm_features,
    can_run_kernels,
    current_architecture,
    library_path,
)
from tests.support.server import REPOSITORY, run_server

FIGURES = Path(__file__).with_name("figures.json")
PAGE = REPOSITORY / "docs" / "throughput.md"
# Engines of the page: each peer in its fastest way.
_ENGINES = [
    *(f"smart-embedder-{kind}" for kind in page.PRECISIONS),
    *("flagembedding", "m3serve", "sentence-transformers-float32", "infinity-float32"),
    *("openvino-bfloat16", "openvino-int8"),
]
# No limit includes instructions for bfloat16.
_LIMITED = [
    f"{name}-{kind}" for name in ("smart-embedder", "openvino") for kind in ("int8", "float32")
]
_FOR_PAGE = {"workloads": [*WORKLOADS], "share": 0.5, "rounds": 5, "minutes": 25, "patience": 900}
_CLIENTS, _REQUESTS = (1, 8, 32), 600


def main() -> None:
    """Run the comparison of the command line; print figures, or write the page."""
    arguments = _parse()
    if not arguments.page:
        figures = _start_figures(arguments, {})
        measure_engines(figures, arguments, lambda: None)
        print(f"{page.about(figures)}\n\n{page.speed(figures)}\n\n{page.ratios(figures)}")
        return
    figures = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    if arguments.folder:
        figures = _start_figures(arguments, figures)

        def save() -> None:
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")

        for name, measure in PARTS.items():
            if name not in figures:
                print(f"{name} ...", file=sys.stderr)
                figures[name] = measure(arguments.folder)
                save()
        measure_engines(figures, arguments, save)
    PAGE.write_text(page.with_tables(PAGE.read_text("utf-8"), figures), "utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="a checkpoint; a random one is saved if it is missing")
    add("--page", action="store_true", help=f"write {PAGE.name}; has other defaults: {_FOR_PAGE}")
    help_ = f"comma-separated workloads: {', '.join(WORKLOADS)}"
    add("--workloads", type=_names(WORKLOADS), default="mixed", help=help_)
    help_ = f"comma-separated engines: {', '.join(CATALOGUE)}; all by default"
    add("--engines", type=_names(CATALOGUE), help=help_)
    add("--limit", choices=["", *LIMITS], default="", help="use no faster instructions")
    add("--share", type=float, default=1, help="share of the texts of each workload")
    add("--rounds", type=int, default=3, help="turns of each engine; slow ones have a third")
    add("--minutes", type=float, default=math.inf, help="time after which no turn begins")
    add("--patience", type=float, default=7200, help="seconds after which a turn has failed")
    if "--page" in sys.argv:
        parser.set_defaults(**_FOR_PAGE)
    arguments = parser.parse_args()
    if arguments.folder is None:
        if not (arguments.page and FIGURES.exists()):
            parser.error("a folder is needed for a checkpoint")
        return arguments
    if can_run_kernels() and not library_path().exists():
        parser.error("the kernels are not built: run python -m smart_embedder.kernels.build")
    # Workers run in another folder.
    arguments.folder = arguments.folder.resolve()
    if not (arguments.folder / "config.json").exists():
        print(f"Saving a random checkpoint of bge-m3's shape in {arguments.folder} ...")
        save_bge_m3(arguments.folder)
    arguments.until = time.monotonic() + 60 * arguments.minutes
    engines = list(CATALOGUE)
    if arguments.page:
        engines = _LIMITED if arguments.limit else _ENGINES
    arguments.engines = arguments.engines or engines
    return arguments


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: a list of known names, without duplicates and in their order."""

    def parse(text: str) -> list[str]:
        names = {name.strip() for name in text.split(",")}
        for name in names.difference(known):
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return [name for name in known if name in names]

    return parse


def texts_of(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Draw a share of the texts of each workload, at least one."""
    workloads = {name: WORKLOADS[name] for name in arguments.workloads}
    return {
        name: draw_texts(workload.lengths, max(1, round(workload.texts * arguments.share)))
        for name, workload in workloads.items()
    }


def measure_engines(
    figures: page.Figures, arguments: argparse.Namespace, save: Callable[[], None]
) -> None:
    """Run the missing turns of the engines until the time is over, and add them to the figures."""
    limit = arguments.limit or figures["machine"]["instructions"]
    known: dict[str, Any] = figures["engines"].setdefault(limit, {})
    # Try an engine that failed again.
    outcomes = [
        Outcome(**known.get(name, {"name": name}) | {"failure": ""}) for name in arguments.engines
    ]
    vectors = ENVIRONMENTS / "vectors" / limit
    vectors.mkdir(parents=True, exist_ok=True)

    def save_engines() -> None:
        known.update((outcome.name, asdict(outcome)) for outcome in outcomes)
        save()

    plan = Plan(
        arguments.folder, texts_of(arguments), arguments.rounds, arguments.patience, vectors,
        arguments.limit, until=arguments.until,
    )  # fmt: skip
    compare(plan, outcomes, save_engines)


def _start_figures(arguments: argparse.Namespace, saved: page.Figures) -> page.Figures:
    """Count the texts' tokens, special tokens included, and start figures or reuse saved ones."""
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    counts = {}
    for name, texts in texts_of(arguments).items():
        lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
        counts[name] = [len(lengths), sum(lengths), max(lengths)]
    return reuse_figures(describe_machine(), counts, saved)


def reuse_figures(
    machine: dict[str, str], texts: dict[str, list[int]], saved: page.Figures
) -> page.Figures:
    """Return the saved figures if they are of this machine, code and texts, else empty ones."""
    if (saved.get("machine"), saved.get("texts")) == (machine, texts):
        return saved
    if saved:
        print("Starting over: machine, code or texts have changed.", file=sys.stderr)
    commit, day = run_git("rev-parse", "--short", "HEAD"), datetime.now(UTC).date().isoformat()
    versions = {name: metadata.version(name) for name in ("torch", "numpy", "tokenizers")}
    versions |= {"smart-embedder": __version__, "python": platform.python_version()}
    return {
        "machine": machine,
        "texts": texts,
        "date": day,
        "commit": commit,
        "versions": versions,
        "engines": {},
    }


def describe_machine() -> dict[str, str]:
    """Describe processor, cores, memory, system, the fastest instruction set and the code."""
    file = Path("/proc/cpuinfo")
    lines = (
        line.partition(":") for line in (file.read_text().splitlines() if file.exists() else [])
    )
    cpu = {name.strip(): value.strip() for name, _, value in lines}
    name = cpu.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in cpu:
        name += f" (family {cpu['cpu family']}, model {cpu['model']})"
    features = set(cpu["flags"].split()) if "flags" in cpu else arm_features()
    runnable = current_architecture().runnable(features)
    fastest = next((instructions.name for instructions in runnable), "none")
    changed = "+" if run_git("status", "--porcelain", "smart_embedder") else ""
    return {
        "processor": name,
        "cores": f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": platform.system(),
        "instructions": fastest,
        "code": run_git("rev-parse", "--short", "HEAD:smart_embedder") + changed,
    }


def run_git(*arguments: str) -> str:
    """Run git in the checkout and return its output."""
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure_load(_: Path) -> Any:
    """Run benchmark.py on a model of two layers with 1, 8 and 32 clients; return its rows."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = save_two_layers(Path(scratch, "two-layer"))
        settings, file = start.settings_of(model, "auto"), Path(scratch, "load.json")
        with run_server(model, "app", fresh=True, **settings) as server:
            command = [sys.executable, "benchmark.py", f"--url={server.url}", f"--json={file}"]
            command += [f"--requests={_REQUESTS}", "--scenarios=embed_dense,embed_full"]
            for clients in _CLIENTS:
                concurrency = f"--concurrency={clients}"
                subprocess.run(
                    [*command, concurrency], cwd=REPOSITORY, check=True, capture_output=True
                )
                rows += json.loads(file.read_text())["scenarios"]
    return rows


PARTS: dict[str, Callable[[Path], Any]] = {
    "start": lambda folder: start.measure(
        folder, {precision: (REPOSITORY, precision) for precision in page.PRECISIONS}, rounds=3
    ),
    "neighbours": lambda _: neighbours.tabulate(
        neighbours.measure(None, [REPOSITORY], [*neighbours.LOADS], rounds=3, seconds=3)
    ),
    "load": measure_load,
}


if __name__ == "__main__":
    main()

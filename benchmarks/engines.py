"""This engine and its peers on the same files and texts, in turn, each in a process of its own.

    python -m benchmarks.engines FOLDER                      # every engine, texts of mixed lengths
    python -m benchmarks.engines FOLDER --workloads queries --limit avx2
    python -m benchmarks.engines FOLDER --page               # docs/throughput.md: 25 minutes
    python -m benchmarks.engines FOLDER --page --limit avx2  # adds engines that are limited
    python -m benchmarks.engines --page                      # only writes tables and picture again

FOLDER holds a checkpoint of bge-m3's shape; where it is missing, one with random weights is made
there. The peers' packages are installed on the first run, into environments of their own. No engine
knows the texts before the clock starts, and only one is in memory at any time.

For the page, the start, load and neighbours are measured, too. What was measured is kept
in benchmarks/figures.json after each turn, and another run goes on where one stopped, if machine,
code and texts are still the same; otherwise it begins anew.
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
# Of the page: of each peer its best way.
_ENGINES = [
    *(f"smart-embedder-{kind}" for kind in page.PRECISIONS),
    *("flagembedding", "m3serve", "sentence-transformers-float32", "infinity-float32"),
    *("openvino-bfloat16", "openvino-int8"),
]
# No limit leaves instructions for bfloat16.
_LIMITED = [
    f"{name}-{kind}" for name in ("smart-embedder", "openvino") for kind in ("int8", "float32")
]
_FOR_PAGE = {"workloads": [*WORKLOADS], "share": 0.5, "rounds": 5, "minutes": 25, "patience": 900}
_CLIENTS, _REQUESTS = (1, 8, 32), 600


def main() -> None:
    """Run what the command line asks for; print it, or write the page."""
    arguments = _parse()
    if not arguments.page:
        figures = _begun(arguments, {})
        measure(figures, arguments, lambda: None)
        print(f"{page.about(figures)}\n\n{page.speed(figures)}\n\n{page.ratios(figures)}")
        return
    figures = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    if arguments.folder:
        figures = _begun(arguments, figures)

        def keep() -> None:
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")

        for name, part in PARTS.items():
            if name not in figures:
                print(f"{name} ...", file=sys.stderr)
                figures[name] = part(arguments.folder)
                keep()
        measure(figures, arguments, keep)
    PAGE.write_text(page.with_tables(PAGE.read_text("utf-8"), figures), "utf-8")
    page.draw(figures, PAGE.parent / "engines-mixed.svg")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="a checkpoint, made if missing")
    add("--page", action="store_true", help=f"write {PAGE.name}; has other defaults: {_FOR_PAGE}")
    help_ = f"which texts, separated by commas: {', '.join(WORKLOADS)}"
    add("--workloads", type=_names(WORKLOADS), default="mixed", help=help_)
    help_ = f"which engines, separated by commas: {', '.join(CATALOGUE)}; by default every one"
    add("--engines", type=_names(CATALOGUE), help=help_)
    add("--limit", choices=["", *LIMITS], default="", help="use no faster instructions")
    add("--share", type=float, default=1, help="of the texts of each workload")
    add("--rounds", type=int, default=3, help="turns of each engine; slow ones have a third")
    add("--minutes", type=float, default=math.inf, help="after which no turn begins")
    add("--patience", type=float, default=7200, help="seconds of a turn until an engine has failed")
    if "--page" in sys.argv:
        parser.set_defaults(**_FOR_PAGE)
    arguments = parser.parse_args()
    if arguments.folder is None:
        if not (arguments.page and FIGURES.exists()):
            parser.error("a folder is needed for a checkpoint")
        return arguments
    if can_run_kernels() and not library_path().exists():
        parser.error("the kernels are not built: run python -m smart_embedder.kernels.build")
    # Workers run in a folder of their own.
    arguments.folder = arguments.folder.resolve()
    if not (arguments.folder / "config.json").exists():
        print(f"Making a random checkpoint of bge-m3's shape in {arguments.folder} ...")
        save_bge_m3(arguments.folder)
    arguments.until = time.monotonic() + 60 * arguments.minutes
    every = list(CATALOGUE)
    if arguments.page:
        every = _LIMITED if arguments.limit else _ENGINES
    arguments.engines = arguments.engines or every
    return arguments


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Argparse type: some of the known names, each once, in their order."""

    def names(text: str) -> list[str]:
        wanted = {name.strip() for name in text.split(",")}
        for name in wanted.difference(known):
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return [name for name in known if name in wanted]

    return names


def texts_of(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """A share of the texts of each workload, at least one."""
    some = {name: WORKLOADS[name] for name in arguments.workloads}
    return {
        name: draw_texts(each.lengths, max(1, round(each.texts * arguments.share)))
        for name, each in some.items()
    }


def measure(figures: page.Figures, arguments: argparse.Namespace, keep: Callable[[], None]) -> None:
    """Add the turns that the engines lack to the figures, until the time is over."""
    limit = arguments.limit or figures["machine"]["instructions"]
    known: dict[str, Any] = figures["engines"].setdefault(limit, {})
    # An engine that failed is tried again.
    outcomes = [
        Outcome(**known.get(name, {"name": name}) | {"failure": ""}) for name in arguments.engines
    ]
    vectors = ENVIRONMENTS / "vectors" / limit
    vectors.mkdir(parents=True, exist_ok=True)

    def keep_engines() -> None:
        known.update((each.name, asdict(each)) for each in outcomes)
        keep()

    plan = Plan(
        arguments.folder, texts_of(arguments), arguments.rounds, arguments.patience, vectors,
        arguments.limit, until=arguments.until,
    )  # fmt: skip
    compare(plan, outcomes, keep_engines)


def _begun(arguments: argparse.Namespace, found: page.Figures) -> page.Figures:
    """The figures so far, or none yet where they are of something else."""
    # As the checkpoint's own tokenizer counts, special tokens included.
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    texts = {}
    for name, some in texts_of(arguments).items():
        lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(some)]
        texts[name] = [len(lengths), sum(lengths), max(lengths)]
    return begun(describe(), texts, found)


def begun(
    machine: dict[str, str], texts: dict[str, list[int]], found: page.Figures
) -> page.Figures:
    """The figures that were found, or none yet where they are of something else."""
    if (found.get("machine"), found.get("texts")) == (machine, texts):
        return found
    if found:
        print("Beginning anew: another machine, other code or other texts.", file=sys.stderr)
    commit, day = git("rev-parse", "--short", "HEAD"), datetime.now(UTC).date().isoformat()
    versions = {name: metadata.version(name) for name in ("torch", "numpy", "tokenizers")}
    versions |= {"smart-embedder": __version__, "python": platform.python_version()}
    began = {"date": day, "commit": commit, "versions": versions}
    return {"machine": machine, "texts": texts, **began, "engines": {}}


def describe() -> dict[str, str]:
    """Processor, cores, memory, system, the fastest instructions with kernels, and the code."""
    file = Path("/proc/cpuinfo")
    lines = (
        line.partition(":") for line in (file.read_text().splitlines() if file.exists() else [])
    )
    cpu = {name.strip(): value.strip() for name, _, value in lines}
    name = cpu.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in cpu:
        name += f" (family {cpu['cpu family']}, model {cpu['model']})"
    has = set(cpu["flags"].split()) if "flags" in cpu else arm_features()
    fastest = next((each.name for each in current_architecture().runnable(has)), "none")
    changed = "+" if git("status", "--porcelain", "smart_embedder") else ""
    return {
        "processor": name,
        "cores": f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": platform.system(),
        "instructions": fastest,
        "code": git("rev-parse", "--short", "HEAD:smart_embedder") + changed,
    }


def git(*arguments: str) -> str:
    """What git says about the checkout."""
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure_load(_: Path) -> Any:
    """Rows of benchmark.py for a model of two layers, by the number of clients."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = save_two_layers(Path(scratch, "two-layer"))
        settings, file = start.settings_of(model, "auto"), Path(scratch, "load.json")
        with run_server(model, "app", fresh=True, **settings) as server:
            command = [sys.executable, "benchmark.py", f"--url={server.url}", f"--json={file}"]
            command += [f"--requests={_REQUESTS}", "--scenarios=embed_dense,embed_full"]
            for clients in _CLIENTS:
                asked = [*command, f"--concurrency={clients}"]
                subprocess.run(asked, cwd=REPOSITORY, check=True, capture_output=True)
                rows += json.loads(file.read_text())["scenarios"]
    return rows


PARTS: dict[str, Callable[[Path], Any]] = {
    "start": lambda folder: start.measured(
        folder, {each: (REPOSITORY, each) for each in page.PRECISIONS}, rounds=3
    ),
    "neighbours": lambda _: neighbours.tabulate(
        neighbours.measure(None, [REPOSITORY], [*neighbours.LOADS], rounds=3, seconds=3)
    ),
    "load": measure_load,
}


if __name__ == "__main__":
    main()

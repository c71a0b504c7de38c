"""This engine and its peers on the same files and texts, in turn, each in a process of its own.

    python -m benchmarks.engines FOLDER                     # every engine, texts of mixed lengths
    python -m benchmarks.engines FOLDER --workload queries --json queries.json

FOLDER holds a checkpoint of bge-m3's shape; where it is missing, one with random weights is made
there. The peers' packages are installed on the first run, into environments of their own. No engine
knows the texts before the clock starts, and only one is in memory at any time.
"""

import argparse
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from tokenizers import Tokenizer

from benchmarks.checkpoints import SHAPES, save_bge_m3
from benchmarks.comparison import CATALOGUE, Plan, compare, format_table, rows_of
from benchmarks.workload import WORKLOADS, draw_texts
from smart_embedder import __version__


def main() -> None:
    """Run the comparison that the command line asks for; print it, and write it."""
    arguments = _parser().parse_args()
    # Workers run in a folder of their own.
    folder, patience = arguments.folder.resolve(), arguments.patience
    if not (folder / "config.json").exists():
        print(f"Making a random checkpoint of bge-m3's shape in {folder} ...")
        save_bge_m3(folder, SHAPES["bge-m3"])
    workload = WORKLOADS[arguments.workload]
    texts = draw_texts(workload.lengths, workload.texts)
    # As the checkpoint's own tokenizer counts, special tokens included.
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    with TemporaryDirectory() as vectors:
        plan = Plan(folder, workload, texts, arguments.rounds, patience, Path(vectors))
        rows = rows_of(compare(plan, arguments.engines), lengths)
    report = {
        "workload": arguments.workload,
        "texts": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "machine": _machine(),
        "smart_embedder": __version__,
        "engines": [asdict(row) for row in rows],
    }
    print(
        f"{report['workload']}: {len(lengths)} texts, {sum(lengths)} tokens, "
        f"the longest {max(lengths)}\n{report['machine']}\n\n{format_table(rows)}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, help="a checkpoint, made if missing")
    add("--workload", choices=sorted(WORKLOADS), default="mixed", help="which texts")
    add("--engines", type=_names, default=",".join(CATALOGUE), help="which, separated by commas")
    add("--rounds", type=int, default=3, help="turns of each engine; slow ones have one")
    add("--patience", type=float, default=7200, help="seconds of a turn until an engine has failed")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return parser


def _names(text: str) -> list[str]:
    """Argparse type: names of the catalogue, each once, in its order."""
    wanted = {name.strip() for name in text.split(",")}
    for name in wanted - CATALOGUE.keys():
        known = ", ".join(CATALOGUE)
        raise argparse.ArgumentTypeError(f"{name!r} is not an engine; choose from {known}")
    return [name for name in CATALOGUE if name in wanted]


def _machine() -> str:
    """Processor, cores, memory and system."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    memory = psutil.virtual_memory().total / 2**30
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


if __name__ == "__main__":
    main()

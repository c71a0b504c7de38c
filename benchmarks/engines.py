"""This engine and its peers on the same files and texts, in turn, each in a process of its own.

    python -m benchmarks.engines FOLDER                     # every engine, texts of mixed lengths
    python -m benchmarks.engines FOLDER --workload queries --json queries.json --pictures docs

FOLDER holds a checkpoint of bge-m3's shape; where it is missing, one with random weights is made
there. The peers' packages are installed on the first run, into environments of their own. No engine
knows the texts before the clock starts, and only one is in memory at any time.
"""

import argparse
import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from benchmarks.catalogue import CATALOGUE
from benchmarks.ceiling import measure_ceilings
from benchmarks.checkpoints import SHAPES, save_bge_m3
from benchmarks.comparison import Comparison, Plan
from benchmarks.cost import Encoder
from benchmarks.environments import DEFAULT_FOLDER
from benchmarks.figures import Figures, Work, median_ceilings
from benchmarks.pictures import draw_engines
from benchmarks.report import make_report
from benchmarks.workload import WORKLOADS, draw_texts


def main() -> None:
    """Run the comparison that the command line asks for."""
    arguments = _parser().parse_args()
    _existing_checkpoint(arguments.folder)
    with TemporaryDirectory() as vectors:
        plan = _plan(arguments, Path(vectors))
        work = Work(_lengths(arguments.folder, plan.texts), Encoder.read(arguments.folder))
        comparison = Comparison(plan, arguments.engines, measure_ceilings)
        asyncio.run(comparison.run())
        ceilings = median_ceilings(comparison.ceilings)
        rows = Figures(comparison.outcomes, work, ceilings, comparison.vectors_file).rows()
    report = make_report(arguments.workload, work, ceilings, rows)
    print(report.as_text(latencies=plan.workload.one_at_a_time))
    _write(report.as_dict(), arguments)


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=_absolute, help="a checkpoint of bge-m3's shape, made if missing")
    add("--workload", choices=sorted(WORKLOADS), default="mixed", help="which texts")
    add("--engines", type=_names, default=",".join(CATALOGUE), help="which, separated by commas")
    add("--rounds", type=int, default=3, help="turns of each engine; slow ones have one")
    add("--texts", type=int, help="instead of the workload's own number")
    add("--patience", type=float, default=3600, help="seconds until an engine counts as failed")
    add("--environment", type=Path, default=DEFAULT_FOLDER, help="where peers are installed")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add("--pictures", type=Path, metavar="FOLDER", help="also draw the figures into this folder")
    return parser


def _absolute(text: str) -> Path:
    """Argparse type: workers run in a folder of their own."""
    return Path(text).resolve()


def _names(text: str) -> list[str]:
    """Argparse type: names of the catalogue, each once, in its order."""
    wanted = {name.strip() for name in text.split(",")}
    for name in wanted - CATALOGUE.keys():
        known = ", ".join(CATALOGUE)
        raise argparse.ArgumentTypeError(f"{name!r} is not an engine; choose from {known}")
    return [name for name in CATALOGUE if name in wanted]


def _existing_checkpoint(folder: Path) -> None:
    if not (folder / "config.json").exists():
        print(f"Making a random checkpoint of bge-m3's shape in {folder} ...")
        save_bge_m3(folder, SHAPES["bge-m3"])


def _plan(arguments: argparse.Namespace, vectors: Path) -> Plan:
    workload = WORKLOADS[arguments.workload]
    return Plan(
        folder=arguments.folder,
        workload=workload,
        texts=draw_texts(workload.lengths, arguments.texts or workload.texts),
        rounds=arguments.rounds,
        environments=arguments.environment,
        patience=arguments.patience,
        vectors=vectors,
    )


def _lengths(folder: Path, texts: list[str]) -> list[int]:
    """As the checkpoint's own tokenizer counts, special tokens included."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]


def _write(report: dict[str, object], arguments: argparse.Namespace) -> None:
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.pictures:
        print(draw_engines(report, arguments.pictures))


if __name__ == "__main__":
    main()

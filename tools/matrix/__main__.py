"""`python -m tools.matrix`: try each text encoder and classifier that transformers knows."""

import argparse
import multiprocessing
import os
import re
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path

# Before a library starts threads: the processes of the matrix are forks of this one.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import structlog
import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from tools.matrix.comparison import (
    CLASSIFIER,
    ENCODER,
    EQUAL,
    KINDS,
    MODULE,
    NO_TEXT,
    RESULTS,
    TRACEBACK,
    Outcome,
    try_model,
)
from tools.matrix.modules import MODULES

_DESCRIPTION = """
Build a tiny random checkpoint of each text encoder and each classifier of the installed
transformers, and of each module of sentence-transformers, start it with the engine, and compare it
with the reference. The exit status is 0 if each is equal or refused in a sentence, else 1.
"""
_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
_TIME_LIMIT = 300.0
_FORK = multiprocessing.get_context("fork")
# A process must not inherit the pipe of another, which would then not end with its process.
_STARTING = threading.Lock()


def main(argv: Sequence[str] | None = None) -> int:
    """Try the models, print the outcomes, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=_DESCRIPTION)
    parser.add_argument("names", nargs="*", help="model types and modules; all by default")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--write", action="store_true", help=f"write the table to {_PAGE.name}")
    options = parser.parse_args(argv)
    tasks = [task for task in all_tasks() if not options.names or task[0] in options.names]
    unknown = set(options.names) - {name for name, _ in tasks}
    if unknown:
        parser.error(f"neither transformers nor sentence-transformers has {', '.join(unknown)}")
    outcomes = []
    for outcome in try_all(tasks, options.jobs):
        if outcome.result != NO_TEXT:
            outcomes.append(outcome)
            print(
                f"{outcome.result:10} {outcome.kind:10} {outcome.name:30} {outcome.detail}",
                flush=True,
            )
    outcomes.sort(key=lambda outcome: (KINDS.index(outcome.kind), outcome.name))
    for kind in KINDS:
        counts = Counter(outcome.result for outcome in outcomes if outcome.kind == kind)
        print(f"{kind}: {', '.join(f'{count} {result}' for result, count in counts.most_common())}")
    if options.write:
        write_table(_PAGE, outcomes)
    return int(any(outcome.is_failed for outcome in outcomes))


def all_tasks() -> list[tuple[str, str]]:
    """Return the names and kinds of what transformers and sentence-transformers have."""
    encoders = dict.fromkeys(
        (*auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, *auto.MODEL_MAPPING_NAMES)
    )
    return [
        *((name, ENCODER) for name in encoders),
        *((name, CLASSIFIER) for name in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        *((name, MODULE) for name in MODULES),
    ]


def try_all(tasks: Sequence[tuple[str, str]], jobs: int) -> Iterator[Outcome]:
    """Yield the outcome of each task, in a process of its own that has a time limit."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with ThreadPoolExecutor(jobs) as threads:
        futures = [threads.submit(_try_in_process, name, kind) for name, kind in tasks]
        for future in as_completed(futures):
            yield future.result()


def _try_in_process(name: str, kind: str) -> Outcome:
    """Return the outcome, also of a process that crashes or hangs."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        with _STARTING:
            receiving, sending = _FORK.Pipe(duplex=False)
            arguments = name, kind, Path(scratch) / "model", sending
            process = _FORK.Process(target=_try_and_send, args=arguments, daemon=True)
            process.start()
            sending.close()
        try:
            if receiving.poll(_TIME_LIMIT):
                received: Outcome = receiving.recv()
                return received
            return Outcome(name, kind, TRACEBACK, f"none after {_TIME_LIMIT:.0f} s")
        except EOFError:
            process.join()
            return Outcome(name, kind, TRACEBACK, f"process ended with status {process.exitcode}")
        finally:
            process.kill()
            process.join()


def _try_and_send(name: str, kind: str, folder: Path, sending: Connection) -> None:
    sending.send(try_model(name, kind, folder))


def write_table(page: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the outcomes between the two markers of the page."""
    text = page.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no {BEGIN} and {END}, between which the table stands")
    page.write_text(f"{before}{BEGIN}\n{format_outcomes(outcomes)}\n{END}{after}", "utf-8")


def format_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Format a table for each kind, with a row for each outcome, and the names that have it."""
    tables = []
    for kind, title in zip(KINDS, ("encoders", "classifiers", "modules"), strict=True):
        rows: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in sorted(outcomes, key=lambda outcome: RESULTS.index(outcome.result)):
            if outcome.kind == kind:
                detail = "" if outcome.result == EQUAL else f": {_shorten(outcome.detail)}"
                rows[f"{outcome.result}{detail}"].append(outcome)
        lines = [f"| result | {title} |", "|---|---|"]
        for result, found in rows.items():
            names = ", ".join(f"`{outcome.name}`" for outcome in found)
            lines.append(f"| {result.replace('|', chr(92) + '|')} ({len(found)}) | {names} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _shorten(sentence: str) -> str:
    """Return the start of a sentence, without names, so that many models share it."""
    start = re.split(r": | \(", sentence, maxsplit=1)[0]
    start = re.sub(r"of type [\w-]+", "of type ...", start)
    return re.sub(r"(the (tensor|tokenizer|module)) .*", r"\1 ...", start)


if __name__ == "__main__":
    sys.exit(main())

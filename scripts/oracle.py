"""A minute of mixed traffic: is every answer the one that an idle server gives to that request?

    python -m scripts.oracle --seconds 60 --dtype float32

For each configuration of models it asks every request once on the idle server, then sends them in
random order from 24 clients, with malformed ones and clients that leave in between. It prints a row
for each configuration, and fails where an answer is wrong, refused or lost.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from app.models.device.choose import cpu_has_int8
from tests.oracle.answers import TOLERANCES, Comparison
from tests.oracle.configurations import Configuration, configurations, save_checkpoints
from tests.oracle.traffic import Traffic, ask_idle
from tests.support.server import RunningServer, run_server

MOST_SHOWN = 20
MODELS = ("bge", "qwen", "late-interaction", "several")
# They have models that are refused in int8.
_NOT_IN_INT8 = ("qwen", "several")
_COLUMNS = "Models            Sent  Equal Refused  Left  Lost Wrong   Texts Unasked  Difference"


def until(deadline: float) -> Iterator[None]:
    """Goes on until a moment of the monotonic clock."""
    while time.monotonic() < deadline:
        yield None


async def observe(
    idle: RunningServer,
    server: RunningServer,
    configuration: Configuration,
    options: argparse.Namespace,
) -> Traffic:
    """Ask the idle server, then the one under load, which may be the same."""
    cases = configuration.draw_cases(options.seed, options.distinct)
    expected = await ask_idle(idle, cases)
    traffic = Traffic(server, cases, expected, Comparison(TOLERANCES[options.dtype]))
    await traffic.run(until(time.monotonic() + options.seconds))
    return traffic


def row(name: str, traffic: Traffic) -> str:
    """One line of the table."""
    tally, found = traffic.tally, traffic.comparison
    equal = tally.answered - len(found.wrong)
    outcomes = f"{tally.sent:6}{equal:7}{tally.refused:8}{tally.abandoned:6}{tally.lost:6}"
    texts = f"{len(found.wrong):6}{found.texts:8}{found.unasked:8}"
    return f"{name:16}{outcomes}{texts}{found.largest:12.1e}  {found.farthest}"


def run(options: argparse.Namespace, scratch: Path) -> bool:
    """Whether every configuration held."""
    held = True
    print(_COLUMNS)
    for name, configuration in configurations(save_checkpoints(scratch)).items():
        if name not in options.models:
            continue
        settings = configuration.settings | {"DTYPE": options.dtype}
        with ExitStack() as stack:
            server = idle = stack.enter_context(run_server(scratch, **settings))
            if further := configuration.only_under_load:
                server = stack.enter_context(run_server(scratch, **settings | further))
            for each in (idle, server):
                each.wait_until_healthy()
            traffic = asyncio.run(observe(idle, server, configuration, options))
        print(row(name, traffic), flush=True)
        for fault in traffic.comparison.wrong[:MOST_SHOWN]:
            print(f"  {fault}")
        held = held and not traffic.comparison.wrong and not traffic.tally.lost
    return held


def parse_options() -> argparse.Namespace:
    """The command line; int8 only where it runs, and without the models that are refused in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=60, help="seconds of traffic for each server (%(default)g)"
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(TOLERANCES),
        default="float32",
        help="the number format, as DTYPE (%(default)s)",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=MODELS,
        help="the models that are served, one set after the other (all)",
    )
    parser.add_argument(
        "--distinct", type=int, default=150, help="the number of different requests (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=5, help="the seed of what is random (%(default)s)"
    )
    options = parser.parse_args()
    if options.dtype == "int8":
        if not cpu_has_int8():
            parser.error("int8 needs an x86 processor with AVX2")
        options.models = [name for name in options.models if name not in _NOT_IN_INT8]
    return options


def main() -> int:
    """Run it; 1 where an answer was wrong, refused without a reason, or lost."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if run(options, Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())

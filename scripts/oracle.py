"""Is every answer right that the description knows, and is it the same under mixed traffic?

    python -m scripts.oracle --seconds 60 --dtype float32

The first part asks servers for every operation of their /openapi.json with every option, value and
format, and compares the answers with transformers' on the same checkpoints, or expects a refusal.
It fails where something of the description has no rule that says what is true.

The second part is a minute of traffic for each configuration of models. It asks every request once
on an idle server, then sends them in random order from 24 clients, with malformed ones and clients
that leave in between. It fails where an answer is wrong, refused or lost. Of models that the
service calls reproducible every number must be the same to the last bit.

The third part, `--parts bits`, asks the engine in this process, which is faster: it embeds and
scores texts alone, and then again and again beside others, and compares all bytes. With
ONEDNN_MAX_CPU_ISA=AVX2 (or AVX512_CORE_VNNI) no kernels for faster instructions are used.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.adapters.smart_embedder import hide_instructions
from smart_embedder.core import EngineCore
from smart_embedder.hardware.device import cpu_has_int8
from smart_embedder.settings import LATE_INTERACTION, EngineSettings
from smart_embedder.startup import load_models
from tests.oracle.answers import TOLERANCES, Comparison
from tests.oracle.asking import ask_everything
from tests.oracle.bits import Bits
from tests.oracle.configurations import (
    Configuration,
    configurations,
    described_servers,
    save_checkpoints,
)
from tests.oracle.described import without_rule
from tests.oracle.traffic import Traffic, ask_idle
from tests.support.server import RunningServer, run_server

MOST_SHOWN = 20
MODELS = ("bge", "qwen", "late-interaction", "several")
# They have models that are refused in int8.
_NOT_IN_INT8 = ("qwen", "several")
_PARTS = ("description", "traffic", "bits")
_COLUMNS = "Models            Sent  Equal Refused  Left  Lost Wrong   Texts Unasked  Difference"


async def observe(
    idle: RunningServer,
    server: RunningServer,
    configuration: Configuration,
    options: argparse.Namespace,
) -> Traffic:
    """Ask the idle server, then the one under load, which may be the same."""
    cases = configuration.draw_cases(options.seed, options.distinct)
    expected = await ask_idle(idle, cases)
    exact = all(each["info"]["reproducible"] for each in served(idle))
    tolerance = 0.0 if exact else TOLERANCES[options.dtype]
    traffic = Traffic(server, cases, expected, Comparison(tolerance))
    ends = time.monotonic() + options.seconds
    await traffic.run(iter(lambda: time.monotonic() < ends, False))
    return traffic


def served(server: RunningServer) -> list[dict[str, Any]]:
    """The models of a server that are loaded, as it tells them."""
    models: list[dict[str, Any]] = server.get("/health").json()["served_models"]
    return [each for each in models if each["info"] is not None]


def row(name: str, traffic: Traffic) -> str:
    """One line of the table."""
    tally, found = traffic.tally, traffic.comparison
    equal = tally.answered - len(found.wrong)
    outcomes = f"{tally.sent:6}{equal:7}{tally.refused:8}{tally.left:6}{tally.lost:6}"
    texts = f"{len(found.wrong):6}{found.texts:8}{found.unasked:8}"
    return f"{name:16}{outcomes}{texts}{found.largest:12.1e}  {found.farthest}"


def run_described(scratch: Path) -> bool:
    """Whether every answer was the one that transformers gives, and everything has a rule."""
    # Other processes use the cores, and forwards are small.
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    held = True
    print("Models            Asked Answers Refused Wrong  Seconds")
    for name, (settings, load) in described_servers(scratch).items():
        with run_server(scratch, **settings | {"DTYPE": "float32"}) as server:
            description, served = server.get("/openapi.json").json(), load()
            missing, began = without_rule(description), time.monotonic()
            with server.client() as client:
                outcome = ask_everything(client, description, served)
        seconds, answers = time.monotonic() - began, outcome.answers.total()
        asked, wrong = answers + outcome.refusals + len(outcome.wrong), len(outcome.wrong)
        counts = f"{asked:6}{answers:8}{outcome.refusals:8}{wrong:6}{seconds:9.0f}"
        print(f"{name:17}{counts}", flush=True)
        for fault in (*missing, *outcome.wrong[:MOST_SHOWN]):
            print(f"  {fault}")
        held = held and not missing and not outcome.wrong
    return held


def run_traffic(options: argparse.Namespace, scratch: Path) -> bool:
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
            traffic = asyncio.run(observe(idle, server, configuration, options))
        print(row(name, traffic), flush=True)
        for fault in traffic.comparison.wrong[:MOST_SHOWN]:
            print(f"  {fault}")
        held = held and not traffic.comparison.wrong and not traffic.tally.lost
    return held


def run_bits(options: argparse.Namespace, scratch: Path) -> bool:
    """Whether no bit of any answer depended on what was beside it."""
    hide_instructions()
    made = save_checkpoints(scratch / "bits")
    pairs: list[tuple[Path, Path | str]] = [(made.m3, made.reranker), (made.qwen, made.qwen)]
    if options.folder is not None:
        pairs = [(options.folder, LATE_INTERACTION)]
    held = True
    print(f"{'Models':79}   Answers  Differing  Seconds")
    for embedding, reranker in pairs:
        settings = EngineSettings(
            embedding_model=str(embedding),
            reranker_model=str(reranker),
            dtype=options.dtype,
            device="cpu",
        )

        async def compare(settings: EngineSettings = settings) -> Bits:
            async with EngineCore(settings, load_models) as engine:
                if not all(each.info and each.info.reproducible for each in engine.statuses):
                    raise SystemExit(f"{settings.embedding_model} is not reproducible here")
                return await Bits.measure(engine, options.distinct, options.words, options.answers)

        began, found = time.monotonic(), asyncio.run(compare())
        named, seconds = f"{embedding.name}, {options.dtype}", time.monotonic() - began
        print(f"{named:79}{found.answers:10}{sum(found.differing.values()):11}{seconds:9.0f}")
        if found.differing:
            print(f"  {found.differing}")
        held = held and not found.differing
    return held


def parse_options() -> argparse.Namespace:
    """The command line; int8 only where it runs, and without the models that are refused in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="what is done (all)")
    help_ = "seconds of traffic for each server (%(default)g)"
    add("--seconds", type=float, default=60, help=help_)
    dtypes, help_ = sorted(TOLERANCES), "the number format, as DTYPE (%(default)s)"
    add("--dtype", choices=dtypes, default="float32", help=help_)
    help_ = "the models that are served, one set after the other (all)"
    add("--models", nargs="+", default=MODELS, help=help_)
    add("--folder", type=Path, help="of a model for the bits, in place of small random ones")
    help_ = "vectors and scores that are compared for the bits (%(default)s)"
    add("--answers", type=int, default=100_000, help=help_)
    add("--words", type=int, default=200, help="the most of a text there (%(default)s)")
    help_ = "the number of different requests, or of texts for the bits (%(default)s)"
    add("--distinct", type=int, default=150, help=help_)
    add("--seed", type=int, default=5, help="the seed of what is random (%(default)s)")
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
        described = "description" not in options.parts or run_described(Path(scratch))
        under_load = "traffic" not in options.parts or run_traffic(options, Path(scratch))
        same_bits = "bits" not in options.parts or run_bits(options, Path(scratch))
    return 0 if described and under_load and same_bits else 1


if __name__ == "__main__":
    sys.exit(main())

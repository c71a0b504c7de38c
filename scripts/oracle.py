"""Check all responses of the API against transformers, alone and under mixed traffic.

    python -m scripts.oracle --seconds 60 --dtype float32

The part `description` sends each operation of /openapi.json with all options, values and formats,
and compares the responses with transformers on the same checkpoints, or expects an error. It fails
if something in the description has no rule for the correct response.

The part `traffic` runs for a minute for each configuration of models. It sends each request once to
an idle server, then all in random order from 24 clients, mixed with malformed requests and clients
that leave. It fails if a response is wrong, refused or lost. For models that the service calls
reproducible all numbers must be equal to the last bit.

The part `bits` calls the engine in this process, which is faster: it embeds and scores texts alone,
then many times in batches, and compares all bytes; pictures with REPRODUCIBLE=true. With
ONEDNN_MAX_CPU_ISA=AVX2 (or AVX512_CORE_VNNI) the engine uses no kernels for faster instructions.
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
from smart_embedder.requests import ImageInput
from smart_embedder.settings import LATE_INTERACTION, EngineSettings
from smart_embedder.startup import load_models
from tests.oracle.bits import Bits, draw_texts
from tests.oracle.comparison import TOLERANCES, Comparison
from tests.oracle.configurations import (
    Configuration,
    configurations,
    described_servers,
    save_checkpoints,
)
from tests.oracle.conformance import check_every_request
from tests.oracle.described import without_rule
from tests.oracle.pictures import draw_urls
from tests.oracle.traffic import Traffic, ask_idle
from tests.support.server import RunningServer, run_server

MAX_SHOWN = 20
MODELS = ("bge", "qwen", "late-interaction", "several", "pictures")
# Their models are refused in int8.
_NOT_IN_INT8 = ("qwen", "several", "pictures")
_PARTS = ("description", "traffic", "bits")
_COLUMNS = "Models            Sent  Equal Refused  Left  Lost Wrong  Difference"


async def observe(
    idle: RunningServer,
    server: RunningServer,
    configuration: Configuration,
    options: argparse.Namespace,
) -> Traffic:
    """Send all requests to the idle server, then run traffic on `server`, which may be the same."""
    cases = configuration.draw_cases(options.seed, options.distinct)
    expected = await ask_idle(idle, cases)
    exact = all(model["info"]["reproducible"] for model in loaded_models(idle))
    tolerance = 0.0 if exact else TOLERANCES[options.dtype]
    traffic = Traffic(server, cases, expected, configuration.malformed, Comparison(tolerance))
    end = time.monotonic() + options.seconds
    await traffic.run(iter(lambda: time.monotonic() < end, False))
    return traffic


def loaded_models(server: RunningServer) -> list[dict[str, Any]]:
    """Return the loaded models in the server's /health."""
    models: list[dict[str, Any]] = server.get("/health").json()["served_models"]
    return [model for model in models if model["info"] is not None]


def format_row(name: str, traffic: Traffic) -> str:
    """Format one line of the table."""
    tally, comparison = traffic.tally, traffic.comparison
    equal = tally.answered - len(comparison.wrong)
    outcomes = f"{tally.sent:6}{equal:7}{tally.refused:8}{tally.left:6}{tally.lost:6}"
    wrong = f"{len(comparison.wrong):6}{comparison.largest:12.1e}  {comparison.farthest}"
    return f"{name:16}{outcomes}{wrong}"


def check_description(scratch: Path) -> bool:
    """Return whether all responses agree with transformers, and everything has a rule."""
    # Other processes use the cores, and forwards are small.
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    passed = True
    print("Models            Asked Answers Refused Wrong  Seconds")
    for name, (settings, load) in described_servers(scratch).items():
        with run_server(scratch, **settings | {"DTYPE": "float32"}) as server:
            description, served = server.get("/openapi.json").json(), load()
            missing, started = without_rule(description), time.monotonic()
            with server.client() as client:
                outcome = check_every_request(client, description, served)
        seconds, answers = time.monotonic() - started, outcome.answers.total()
        sent, wrong = answers + outcome.refusals + len(outcome.wrong), len(outcome.wrong)
        counts = f"{sent:6}{answers:8}{outcome.refusals:8}{wrong:6}{seconds:9.0f}"
        print(f"{name:17}{counts}", flush=True)
        for fault in (*missing, *outcome.wrong[:MAX_SHOWN]):
            print(f"  {fault}")
        passed = passed and not missing and not outcome.wrong
    return passed


def check_traffic(options: argparse.Namespace, scratch: Path) -> bool:
    """Return whether all responses of all configurations were correct."""
    passed = True
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
        print(format_row(name, traffic), flush=True)
        for fault in traffic.comparison.wrong[:MAX_SHOWN]:
            print(f"  {fault}")
        passed = passed and not traffic.comparison.wrong and not traffic.tally.lost
    return passed


def check_bits(options: argparse.Namespace, scratch: Path) -> bool:
    """Return whether all results are bit-identical alone and in batches."""
    hide_instructions()
    saved = save_checkpoints(scratch / "bits")
    texts = draw_texts(options.distinct, options.words)
    pictures = [ImageInput(url) for url in draw_urls(options.seed, options.distinct)]
    clip, pages = saved.pictures / "clip", saved.pictures / "pages"
    runs: list[tuple[Path, Path | str, list[Any]]] = [
        (saved.m3, saved.reranker, texts),
        (saved.qwen, saved.qwen, texts),
        (clip, LATE_INTERACTION, [*texts, *pictures]),
        (pages, LATE_INTERACTION, pictures),
    ]
    if options.folder is not None:
        runs = [(options.folder, LATE_INTERACTION, texts)]
    passed = True
    print(f"{'Models':79}   Answers  Differing  Seconds")
    for embedding, reranker, inputs in runs:
        settings = EngineSettings(
            embedding_model=str(embedding),
            reranker_model=str(reranker),
            dtype=options.dtype,
            device="cpu",
            reproducible=inputs is not texts,
        )

        async def compare(settings: EngineSettings = settings, inputs: Any = inputs) -> Bits:
            async with EngineCore(settings, load_models) as engine:
                if not all(status.info and status.info.reproducible for status in engine.statuses):
                    raise SystemExit(f"{settings.embedding_model} is not reproducible here")
                return await Bits.measure(engine, inputs, options.answers)

        started, bits = time.monotonic(), asyncio.run(compare())
        name, seconds = f"{embedding.name}, {options.dtype}", time.monotonic() - started
        print(f"{name:79}{bits.answers:10}{sum(bits.differing.values()):11}{seconds:9.0f}")
        if bits.differing:
            print(f"  {bits.differing}")
        passed = passed and not bits.differing
    return passed


def parse_options() -> argparse.Namespace:
    """Parse the command line; for int8, leave out the models that are refused in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="parts to run (all)")
    help_ = "seconds of traffic for each server (%(default)g)"
    add("--seconds", type=float, default=60, help=help_)
    dtypes, help_ = sorted(TOLERANCES), "the number format, as DTYPE (%(default)s)"
    add("--dtype", choices=dtypes, default="float32", help=help_)
    add("--models", nargs="+", default=MODELS, help="configurations for traffic (all)")
    add("--folder", type=Path, help="model for bits, instead of small random ones")
    help_ = "number of vectors and scores to compare in bits (%(default)s)"
    add("--answers", type=int, default=100_000, help=help_)
    add("--words", type=int, default=200, help="maximum words of a text in bits (%(default)s)")
    help_ = "number of different requests in traffic, or texts in bits (%(default)s)"
    add("--distinct", type=int, default=150, help=help_)
    add("--seed", type=int, default=5, help="random seed (%(default)s)")
    options = parser.parse_args()
    if options.dtype == "int8":
        if not cpu_has_int8():
            parser.error("int8 needs an x86 processor with AVX2")
        options.models = [name for name in options.models if name not in _NOT_IN_INT8]
    return options


def main() -> int:
    """Run the parts; return 1 if a response was wrong, refused or lost."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as scratch:
        passed = [
            "description" not in options.parts or check_description(Path(scratch)),
            "traffic" not in options.parts or check_traffic(options, Path(scratch)),
            "bits" not in options.parts or check_bits(options, Path(scratch)),
        ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())

"""This engine and its peers on the same files and texts, in turn, in one process.

    python -m benchmarks.engines FOLDER --dtype float32 --rounds 3

The engines take turns round by round, because the speed of a shared machine drifts; the table shows
each engine's median and the ratio of the medians.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from FlagEmbedding import BGEM3FlagModel

from app.engine import Engine
from app.jobs import FloatArray
from app.settings import Settings
from benchmarks.workload import MIXED, draw_texts

Encode = Callable[[list[str]], FloatArray]


def this_engine(folder: Path, dtype: str, loop: asyncio.AbstractEventLoop) -> Encode:
    """Texts to dense vectors through `Engine`, with all three kinds computed."""
    settings = Settings.model_validate(
        {"embedding_model": str(folder), "device": "cpu", "dtype": dtype}
    )
    engine = loop.run_until_complete(Engine(settings).__aenter__())

    def encode(texts: list[str]) -> FloatArray:
        result = loop.run_until_complete(engine.embed(texts))
        return np.stack([e.dense for e in result.embeddings if e.dense is not None])

    return encode


def flag_embedding(folder: Path) -> Encode:
    """The reference implementation with its defaults, all three kinds, in float32 on a CPU."""
    model = BGEM3FlagModel(str(folder), use_fp16=False, devices="cpu")

    def encode(texts: list[str]) -> FloatArray:
        vectors = model.encode(
            texts, max_length=8192, return_dense=True, return_sparse=True, return_colbert_vecs=True
        )
        return np.asarray(vectors["dense_vecs"], dtype=np.float32)

    return encode


def measure(engines: dict[str, Encode], texts: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every engine, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for encode in engines.values():
        encode(texts[:8])
    for _ in range(rounds):
        for name, encode in engines.items():
            started = time.perf_counter()
            encode(texts)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def print_table(seconds: dict[str, list[float]], count: int, cosines: dict[str, float]) -> None:
    """One row for each engine; ratios are against the last, the reference."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    reference = medians[list(medians)[-1]]
    print(f"{'Engine':24}{'Texts/s':>10}{'Ratio':>8}{'Worst cosine':>14}  Rounds (s)")
    for name, median in medians.items():
        rounds = " ".join(f"{value:.2f}" for value in seconds[name])
        ratio = reference / median
        print(f"{name:24}{count / median:10.2f}{ratio:8.2f}{cosines[name]:14.6f}  {rounds}")


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint of benchmarks.checkpoints")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with asyncio.Runner() as runner:
        engines = {
            f"smart-embedder {arguments.dtype}": this_engine(
                arguments.folder, arguments.dtype, runner.get_loop()
            ),
            "FlagEmbedding float32": flag_embedding(arguments.folder),
        }
        texts = draw_texts(MIXED, arguments.texts)
        expected = engines["FlagEmbedding float32"](texts)
        cosines = {
            name: float((encode(texts) * expected).sum(axis=1).min())
            for name, encode in engines.items()
        }
        print_table(measure(engines, texts, arguments.rounds), len(texts), cosines)


if __name__ == "__main__":
    main()

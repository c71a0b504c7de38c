"""This engine and its peers on the same files and texts, in turn, in one process.

    python -m benchmarks.engines FOLDER --rounds 3

The engines take turns round by round, because the speed of a shared machine drifts; the table shows
each engine's median and the ratio of the medians.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
        {
            "embedding_model": str(folder),
            "reranker_model": "none",
            "device": "cpu",
            "dtype": dtype,
        }
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


@dataclass(slots=True)
class Measured:
    """One engine's seconds, round by round, and the dense vectors of its last round."""

    seconds: list[float] = field(default_factory=list)
    vectors: FloatArray | None = None

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)


def measure(engines: dict[str, Encode], texts: list[str], rounds: int) -> dict[str, Measured]:
    """Run every engine `rounds` times in turn, after a short run that is not counted."""
    measured = {name: Measured() for name in engines}
    for encode in engines.values():
        encode(texts[:8])
    for _ in range(rounds):
        for name, encode in engines.items():
            started = time.perf_counter()
            measured[name].vectors = encode(texts)
            measured[name].seconds.append(time.perf_counter() - started)
    return measured


def print_table(measured: dict[str, Measured], texts: int) -> None:
    """One row for each engine; ratios and cosines are against the last, the reference."""
    reference = list(measured.values())[-1]
    print(f"{'Engine':26}{'Texts/s':>10}{'Ratio':>8}{'Worst cosine':>14}  Rounds (s)")
    for name, one in measured.items():
        rounds = " ".join(f"{value:.2f}" for value in one.seconds)
        cosine = _worst_cosine(one, reference)
        ratio = reference.median / one.median
        print(f"{name:26}{texts / one.median:10.2f}{ratio:8.2f}{cosine:14.6f}  {rounds}")


def _worst_cosine(one: Measured, other: Measured) -> float:
    if one.vectors is None or other.vectors is None:
        raise ValueError("an engine was not measured")
    return float((one.vectors * other.vectors).sum(axis=1).min())


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint of benchmarks.checkpoints")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of this engine")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        engines = {
            f"smart-embedder {dtype}": this_engine(arguments.folder, dtype, loop)
            for dtype in arguments.dtypes.split(",")
        }
        engines["FlagEmbedding float32"] = flag_embedding(arguments.folder)
        texts = draw_texts(MIXED, arguments.texts)
        print_table(measure(engines, texts, arguments.rounds), len(texts))


if __name__ == "__main__":
    main()

"""This engine and a reranker's reference implementation, in turn, in one process.

python -m benchmarks.rerankers EMBEDDER_FOLDER RERANKER_FOLDER --rounds 3

Both read the same files and passages. The reference of bge-reranker is FlagReranker in float32, its
default on a CPU; that of Qwen3-Reranker is transformers, in the same dtype.
"""

import argparse
import asyncio
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.workload import PASSAGES, QUERIES, draw_texts, turns
from smart_embedder.core import EngineCore
from smart_embedder.requests import RerankRequest
from smart_embedder.settings import EngineSettings
from smart_embedder.startup import load_models
from tools.references.choose import References
from tools.table import markdown

QUERY = draw_texts(QUERIES, 1, seed=1)[0]


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("embedder", type=Path, help="a checkpoint of bge-m3's shape, resident beside the reranker")
    add("reranker", type=Path, help="a checkpoint of a reranker")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="as DTYPE")
    add("--rounds", type=int, default=3, help="turns of each case (%(default)s)")
    arguments = parser.parse_args()
    settings = EngineSettings(
        embedding_model=str(arguments.embedder),
        reranker_model=str(arguments.reranker),
        device="cpu",
        dtype=arguments.dtype,
    )
    passages = draw_texts(PASSAGES, 32)
    with asyncio.Runner() as runner:
        engine = EngineCore(settings, load_models)
        runner.run(engine.start())
        reference = References(settings, dtype=arguments.dtype).reranking
        assert reference is not None

        def ours(some: list[str]) -> list[float]:
            return runner.run(engine.rerank(RerankRequest(QUERY, some))).scores

        def theirs(some: list[str]) -> list[float]:
            return reference.scores(QUERY, some)

        engines = {f"smart-embedder {arguments.dtype}": ours, reference.package: theirs}
        # The first, short run is not counted.
        for score in engines.values():
            score(passages[:8])
        runs = {name: partial(score, passages) for name, score in engines.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for name in turns(dict.fromkeys(runs, arguments.rounds)):
            began = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - began)
        scores = {name: np.array(run()) for name, run in runs.items()}
        runner.run(engine.close())
    medians = {name: statistics.median(took) for name, took in seconds.items()}
    rows = (
        (
            name,
            f"{len(passages) / median:.2f}",
            f"{medians[reference.package] / median:.2f}",
            f"{np.abs(scores[name] - scores[reference.package]).max():.6f}",
            ", ".join(f"{each:.2f}" for each in seconds[name]),
        )
        for name, median in medians.items()
    )
    heads = ("engine", "pairs/s", "ratio", "largest difference", "rounds, seconds")
    print(markdown(heads, rows))


if __name__ == "__main__":
    main()

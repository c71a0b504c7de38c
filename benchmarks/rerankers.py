"""This engine and FlagReranker on the same files and passages, in turn, in one process.

python -m benchmarks.rerankers EMBEDDER_FOLDER RERANKER_FOLDER --rounds 3
"""

import argparse
import asyncio
from pathlib import Path

import numpy as np
from FlagEmbedding import FlagReranker

from app.engine import Engine, RerankRequest
from app.jobs import FloatArray
from app.settings import Settings
from benchmarks.turns import Compute, measure, print_table
from benchmarks.workload import PASSAGES, QUERIES, draw_texts

QUERY = draw_texts(QUERIES, 1, seed=1)[0]


def this_engine(arguments: argparse.Namespace, loop: asyncio.AbstractEventLoop) -> Compute:
    """Passages to logits through `Engine`; bge-m3 is resident beside the reranker."""
    settings = Settings.model_validate(
        {
            "embedding_model": str(arguments.embedder),
            "reranker_model": str(arguments.reranker),
            "device": "cpu",
            "dtype": arguments.dtype,
        }
    )
    engine = loop.run_until_complete(Engine(settings).__aenter__())

    def score(passages: list[str]) -> FloatArray:
        result = loop.run_until_complete(engine.rerank(RerankRequest(QUERY, passages)))
        return np.array(result.scores, np.float32)

    return score


def flag_reranker(folder: Path) -> Compute:
    """The reference implementation with its default batch size, in float32 on a CPU."""
    model = FlagReranker(str(folder), use_fp16=False, devices="cpu", max_length=8192)

    def score(passages: list[str]) -> FloatArray:
        return np.array(model.compute_score([(QUERY, each) for each in passages]), np.float32)

    return score


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("embedder", type=Path)
    parser.add_argument("reranker", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--passages", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with asyncio.Runner() as runner:
        engines = {
            f"smart-embedder {arguments.dtype}": this_engine(arguments, runner.get_loop()),
            "FlagReranker float32": flag_reranker(arguments.reranker),
        }
        passages = draw_texts(PASSAGES, arguments.passages)
        print_table(measure(engines, passages, arguments.rounds), len(passages), "Pairs/s")


if __name__ == "__main__":
    main()

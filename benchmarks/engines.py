"""This engine and its peers on the same files and texts, in turn, in one process.

    python -m benchmarks.engines FOLDER --rounds 3

The engines take turns round by round, because the speed of a shared machine drifts; the table shows
each engine's median and the ratio of the medians.
"""

import argparse
import asyncio
from pathlib import Path

import numpy as np
from FlagEmbedding import BGEM3FlagModel

from app.engine import Engine
from app.jobs import FloatArray
from app.settings import Settings
from benchmarks.turns import Compute, measure, print_table
from benchmarks.workload import MIXED, draw_texts


def this_engine(folder: Path, dtype: str, loop: asyncio.AbstractEventLoop) -> Compute:
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


def flag_embedding(folder: Path) -> Compute:
    """The reference implementation with its defaults, all three kinds, in float32 on a CPU."""
    model = BGEM3FlagModel(str(folder), use_fp16=False, devices="cpu")

    def encode(texts: list[str]) -> FloatArray:
        vectors = model.encode(
            texts, max_length=8192, return_dense=True, return_sparse=True, return_colbert_vecs=True
        )
        return np.asarray(vectors["dense_vecs"], dtype=np.float32)

    return encode


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
        print_table(measure(engines, texts, arguments.rounds), len(texts), "Texts/s")


if __name__ == "__main__":
    main()

"""This engine and a reranker's reference implementation, in turn, in one process.

python -m benchmarks.rerankers EMBEDDER_FOLDER RERANKER_FOLDER --rounds 3

Both read the same files and passages. The reference of bge-reranker is FlagReranker in float32, its
default on a CPU; that of Qwen3-Reranker is transformers, in the same dtype.
"""

import argparse
import asyncio
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from FlagEmbedding import FlagReranker
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.turns import measure
from benchmarks.workload import PASSAGES, QUERIES, draw_texts
from smart_embedder.engine import Engine, RerankRequest
from smart_embedder.engine.records import FloatArray
from smart_embedder.models.checkpoint.config import read_config
from smart_embedder.models.load import load_models
from smart_embedder.models.tasks.qwen3 import DEFAULT_INSTRUCTION
from smart_embedder.settings import Settings
from tools.references.qwen import padded, qwen_rows, yes_and_no
from tools.table import markdown

QUERY = draw_texts(QUERIES, 1, seed=1)[0]

# Passages to scores [N].
Score = Callable[[list[str]], FloatArray]


def this_engine(arguments: argparse.Namespace, loop: asyncio.AbstractEventLoop) -> Score:
    """Passages to logits through `Engine`; bge-m3 is resident beside the reranker."""
    settings = Settings(
        embedding_model=str(arguments.embedder),
        reranker_model=str(arguments.reranker),
        device="cpu",
        dtype=arguments.dtype,
    )
    engine = loop.run_until_complete(Engine(settings, load_models).__aenter__())

    def score(passages: list[str]) -> FloatArray:
        result = loop.run_until_complete(engine.rerank(RerankRequest(QUERY, passages)))
        return np.array(result.scores, np.float32)

    return score


def flag_reranker(folder: Path) -> Score:
    """The reference implementation with its default batch size, in float32 on a CPU."""
    model = FlagReranker(str(folder), use_fp16=False, devices="cpu", max_length=8192)

    def score(passages: list[str]) -> FloatArray:
        return np.array(model.compute_score([(QUERY, each) for each in passages]), np.float32)

    return score


def transformers_reranker(folder: Path, dtype: str) -> Score:
    """Qwen3-Reranker by transformers, pairs of near lengths together in batches of 8.

    The model card's code is slower: it computes the vocabulary's logits for every token.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    limit, answers = model.config.max_position_embeddings, yes_and_no(tokenizer)

    def score(passages: list[str]) -> FloatArray:
        rows = qwen_rows(tokenizer, QUERY, passages, limit, DEFAULT_INSTRUCTION)
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        outputs = padded(model, [rows[place] for place in order], logits_to_keep=1)
        logits = torch.cat([output.logits[:, -1, answers] for output in outputs])
        scores = np.empty(len(rows), np.float32)
        scores[order] = logits.float().softmax(1)[:, 0].numpy()
        return scores

    return score


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("embedder", type=Path, help="a checkpoint of bge-m3's shape")
    add("reranker", type=Path, help="a checkpoint of a reranker")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="as DTYPE")
    add("--rounds", type=int, default=3, help="turns of each case (%(default)s)")
    arguments = parser.parse_args()
    passages = draw_texts(PASSAGES, 32)
    with asyncio.Runner() as runner:
        ours = this_engine(arguments, runner.get_loop())
        if read_config(arguments.reranker).get("model_type") == "qwen3":
            theirs = transformers_reranker(arguments.reranker, arguments.dtype)
            name = f"transformers {arguments.dtype}"
        else:
            theirs, name = flag_reranker(arguments.reranker), "FlagReranker float32"
        engines = {f"smart-embedder {arguments.dtype}": ours, name: theirs}
        # The first, short run is not counted.
        for score in engines.values():
            score(passages[:8])
        runs = {name: partial(score, passages) for name, score in engines.items()}
        seconds = measure(runs, arguments.rounds)
        expected = theirs(passages)
        differences = {name: np.abs(run() - expected).max() for name, run in runs.items()}
    medians = {name: statistics.median(took) for name, took in seconds.items()}
    rows = (
        (
            engine,
            f"{len(passages) / median:.2f}",
            f"{medians[name] / median:.2f}",
            f"{differences[engine]:.6f}",
            ", ".join(f"{each:.2f}" for each in seconds[engine]),
        )
        for engine, median in medians.items()
    )
    heads = ("engine", "pairs/s", "ratio", "largest difference", "rounds, seconds")
    print(markdown(heads, rows))


if __name__ == "__main__":
    main()

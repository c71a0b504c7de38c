"""How well vectors find answers in fewer bits, pooled, and by MUVERA, on the demo's questions.

    python -m scripts.retrieval_quality FOLDER

FOLDER holds the demo's model (`python -m tools.demo FOLDER`). For each way: the share of questions
whose passage comes first, and the mean of 1 / its rank, where it is among the first ten.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.engine import Engine
from app.engine.types import FloatArray, TextEmbedding
from app.models.load import load_models
from app.settings import Settings
from app.vectors.muvera import MUVERA_WIDTH, MuveraSide, muvera_of
from app.vectors.pooling import pool
from app.vectors.quantization import OUTPUT_DTYPES, OutputDtype, quantize

QUESTIONS = Path(__file__).parents[1] / "tests/tools/demo/retrieval_set.json"
_RANKS = 10

Scores = npt.NDArray[np.float32]


def restore(vectors: FloatArray, dtype: OutputDtype) -> FloatArray:
    """The vectors as a client restores them from `dtype`; of bits, 1 and -1."""
    made = quantize(vectors, dtype)
    values = made.values
    if dtype in {"binary", "ubinary"}:
        bits = values if dtype == "ubinary" else values.view(np.uint8) + np.uint8(128)
        return np.unpackbits(bits, axis=-1, count=vectors.shape[-1]) * np.float32(2) - 1
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    numbers = values.astype(np.float32) - (128 if dtype == "uint8" else 0)
    return numbers if made.scales is None else numbers * made.scales[..., None]


def maxsim(questions: Sequence[FloatArray], passages: Sequence[FloatArray]) -> Scores:
    """`[questions, passages]`."""
    return np.array([[(q @ p.T).max(axis=1).mean() for p in passages] for q in questions])


def colbert_scores(
    questions: Sequence[TextEmbedding],
    passages: Sequence[TextEmbedding],
    dtype: OutputDtype = "float32",
    factor: int = 1,
) -> Scores:
    """Of all questions in float32 with the passages' vectors pooled, then quantized."""
    own = [restore(pool(_colbert(each), factor), dtype) for each in passages]
    return maxsim([_colbert(each) for each in questions], own)


def mean_reciprocal_rank(scores: Scores, answers: npt.NDArray[np.int64]) -> float:
    """Over the first ten passages of each question."""
    ranks = _ranks(scores, answers)
    return float(np.where(ranks <= _RANKS, 1 / ranks, 0).mean())


def _ranks(scores: Scores, answers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    order = np.argsort(-scores, axis=1, kind="stable")
    ranks: npt.NDArray[np.int64] = (order == answers[:, None]).argmax(axis=1) + 1
    return ranks


def _colbert(embedding: TextEmbedding) -> FloatArray:
    assert embedding.colbert is not None
    return embedding.colbert


def _dense(embeddings: Sequence[TextEmbedding], dtype: OutputDtype) -> FloatArray:
    return restore(np.stack([each.dense for each in embeddings if each.dense is not None]), dtype)


def _muvera(embeddings: Sequence[TextEmbedding], side: MuveraSide) -> FloatArray:
    vectors = [_colbert(each) for each in embeddings]
    return np.stack([muvera_of(each.shape[1]).encode(each, side) for each in vectors])


def _best_of(candidates: Scores, scores: Scores, count: int) -> Scores:
    """The scores of the best `count` candidates alone."""
    kept = np.full_like(scores, -np.inf)
    best = np.argsort(-candidates, axis=1)[:, :count]
    np.put_along_axis(kept, best, np.take_along_axis(scores, best, axis=1), axis=1)
    return kept


async def embed(folder: Path, texts: list[str]) -> list[TextEmbedding]:
    """All kinds of vectors, in float32."""
    settings = Settings(
        embedding_model=str(folder), reranker_model="none", device="cpu", dtype="float32"
    )
    async with Engine(settings, load_models) as engine:
        return (await engine.embed(texts)).embeddings


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    given = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    asked = [each["question"] for each in given["questions"]]
    answers = np.array([each["passage"] for each in given["questions"]])
    texts = asked + [each["text"] for each in given["passages"]]
    embeddings = asyncio.run(embed(parser.parse_args().folder, texts))
    questions, passages = embeddings[: len(asked)], embeddings[len(asked) :]

    def show(name: str, scores: Scores) -> None:
        first = (_ranks(scores, answers) == 1).mean()
        print(f"| {name} | {first:.3f} | {mean_reciprocal_rank(scores, answers):.3f} |")

    print("| vectors | first | MRR@10 |\n|---|---|---|")
    for dtype in OUTPUT_DTYPES:
        show(f"dense, {dtype}", _dense(questions, dtype) @ _dense(passages, dtype).T)
    score = partial(colbert_scores, questions, passages)
    for dtype in OUTPUT_DTYPES:
        show(f"ColBERT, {dtype}", score(dtype))
    for factor in (2, 3, 4):
        for dtype in OUTPUT_DTYPES[:1] + OUTPUT_DTYPES[3:4]:
            show(f"ColBERT, pooled by {factor}, {dtype}", score(dtype, factor))
    candidates = _muvera(questions, "query") @ _muvera(passages, "document").T
    show(f"MUVERA, {MUVERA_WIDTH} numbers", candidates)
    show("MUVERA, the best 10 by MaxSim", _best_of(candidates, score(), 10))


if __name__ == "__main__":
    main()

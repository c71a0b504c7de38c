"""The demo finds the right passage by each kind of vector, and best by all of them together.

The 120 passages hold several on every topic that can be mistaken for one another; the 120
questions, one for each, are put as people put them. A score is bge-m3's own; the fused one weighs
the three alike, which is FlagEmbedding's default.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from smart_embedder.engine import Engine
from smart_embedder.engine.records import SparseVector, TextEmbedding
from smart_embedder.models.device.choose import cpu_has_int8
from smart_embedder.models.load import load_models
from smart_embedder.settings import Settings
from tools.evaluate.dataset import read_beir

SET = read_beir(Path(__file__).with_name("questions"), "test")
DOCUMENTS = SET.corpus.read(range(len(SET.corpus)))
PASSAGES = [document.text for document in DOCUMENTS]
QUESTIONS = list(SET.queries.values())
PLACES = {document.id: place for place, document in enumerate(DOCUMENTS)}
ANSWERS = np.array([PLACES[answer] for query in SET.queries for answer in SET.qrels[query]])


@dataclass(frozen=True, slots=True)
class Scores:
    """`[questions, passages]` by each kind of vector."""

    dense: np.ndarray
    sparse: np.ndarray
    colbert: np.ndarray

    @property
    def fused(self) -> np.ndarray:
        return (self.dense + self.sparse + self.colbert) / 3


@pytest.fixture(scope="module")
def scores(demo_checkpoint: Path) -> Scores:
    return scores_in(demo_checkpoint, "float32")


def scores_in(folder: Path, dtype: str) -> Scores:
    embeddings = asyncio.run(embed(folder, QUESTIONS + PASSAGES, dtype))
    questions, passages = embeddings[: len(QUESTIONS)], embeddings[len(QUESTIONS) :]
    return Scores(
        dense=table(questions, passages, lambda q, p: q.dense @ p.dense),
        sparse=table(questions, passages, lambda q, p: overlap(q.sparse, p.sparse)),
        colbert=table(questions, passages, lambda q, p: (q.colbert @ p.colbert.T).max(1).mean()),
    )


async def embed(folder: Path, texts: list[str], dtype: str) -> list[TextEmbedding]:
    settings = Settings(
        embedding_model=str(folder), reranker_model="none", device="cpu", dtype=dtype
    )
    async with Engine(settings, load_models) as engine:
        return (await engine.embed(texts, dense=True, sparse=True, colbert=True)).embeddings


def table(questions, passages, score) -> np.ndarray:
    return np.array([[score(q, p) for p in passages] for q in questions])


def overlap(a: SparseVector, b: SparseVector) -> float:
    _, left, right = np.intersect1d(a.indices, b.indices, return_indices=True)
    return float(a.values[left] @ b.values[right])


def right_first(scores: np.ndarray) -> int:
    return int((scores.argmax(1) == ANSWERS).sum())


def test_the_set_is_large_and_sound():
    assert len(set(PASSAGES)) == len(PASSAGES) == 120
    assert len(set(QUESTIONS)) == len(QUESTIONS) == 120
    assert len(set(ANSWERS)) == len(ANSWERS)
    assert all(0 <= answer < len(PASSAGES) for answer in ANSWERS)


@pytest.mark.parametrize("kind", ["dense", "sparse", "colbert"])
def test_each_kind_of_vector_puts_the_right_passage_first(scores: Scores, kind: str):
    assert right_first(getattr(scores, kind)) >= 0.7 * len(QUESTIONS)


def test_fused_scores_are_at_least_as_good_as_the_best_alone(scores: Scores):
    alone = [right_first(s) for s in (scores.dense, scores.sparse, scores.colbert)]
    assert right_first(scores.fused) >= max(alone)


def test_sparse_scores_are_of_the_size_that_bge_m3s_are(scores: Scores):
    matching = scores.sparse[np.arange(len(ANSWERS)), ANSWERS]
    assert 0.1 < np.median(matching) < 0.6
    assert np.median(scores.sparse) < 0.2 * np.median(matching)


@pytest.mark.skipif(not cpu_has_int8(), reason="needs an x86 processor with AVX2")
def test_in_8_bits_it_finds_what_it_finds_in_float32(scores: Scores, demo_checkpoint: Path):
    rounded = scores_in(demo_checkpoint, "int8")
    found, expected = (
        sum(right_first(s) for s in (each.dense, each.sparse, each.colbert, each.fused))
        for each in (rounded, scores)
    )
    assert found >= 0.99 * expected
    assert np.abs(rounded.dense - scores.dense).max() < 0.05

"""The demo finds the right passage by each kind of vector, and best by all of them together.

The 120 passages hold several on every topic that can be mistaken for one another; the 120
questions, one for each, are put as people put them. A score is bge-m3's own; the fused one weighs
the three alike, which is FlagEmbedding's default.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from smart_embedder.engine import Engine
from smart_embedder.engine.records import EmbedRequest, Outputs
from smart_embedder.models.device.choose import cpu_has_int8
from smart_embedder.models.load import load_models
from smart_embedder.settings import Settings
from tools.evaluate import __main__ as tool
from tools.evaluate.dataset import read_beir
from tools.evaluate.representations import Piece, Queries

QUESTIONS = Path(__file__).with_name("questions")
KINDS = ("dense", "sparse", "colbert")


def found_first(folder: Path, dtype: str) -> dict[str, float]:
    """The share of questions whose right passage comes first, by the kind of vector."""
    settings = {"EMBEDDING_MODEL": str(folder), "RERANKER_MODEL": "none", "DTYPE": dtype}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (settings | {"DEVICE": "cpu"}).items():
            patch.setenv(name, value)
        arguments = [str(QUESTIONS), "--rerank", "0", "--only", ";".join([*KINDS, "fused"])]
        (found,) = asyncio.run(tool.run(tool.parse(arguments)))
    return {row.representation: row.quality.success_1 for row in found.rows}


@pytest.fixture(scope="module")
def found(demo_checkpoint: Path) -> dict[str, float]:
    return found_first(demo_checkpoint, "float32")


def test_each_kind_puts_the_right_passage_first_and_all_together_are_best(found) -> None:
    assert min(found.values()) >= 0.7
    assert found["fused"] >= max(found[kind] for kind in KINDS)


@pytest.mark.skipif(not cpu_has_int8(), reason="needs an x86 processor with AVX2")
def test_in_8_bits_it_finds_what_it_finds_in_float32(found, demo_checkpoint: Path) -> None:
    assert sum(found_first(demo_checkpoint, "int8").values()) >= 0.99 * sum(found.values())


async def test_sparse_scores_are_of_the_size_that_bge_m3s_are(demo_checkpoint: Path) -> None:
    read = read_beir(QUESTIONS, "test")
    texts = [each.text for each in read.corpus.read(range(40))]
    settings = Settings(
        embedding_model=str(demo_checkpoint), reranker_model="none", device="cpu", dtype="float32"
    )
    request = EmbedRequest([*read.queries.values()][:40] + texts, Outputs(dense=True, sparse=True))
    async with Engine(settings, load_models) as engine:
        made = (await engine.embed(request)).embeddings
    # Each question is that of the passage in its own place.
    scores = Piece(Queries(made[: len(texts)]), made[len(texts) :]).sparse.scores
    assert 0.1 < np.median(scores.diagonal()) < 0.6
    assert np.median(scores) < 0.2 * np.median(scores.diagonal())

"""The demo finds the right passage by each kind of vector, and across languages.

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
from smart_embedder.settings.engine import EngineSettings
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
        arguments = [
            str(QUESTIONS),
            "--rerank",
            "0",
            "--only",
            ";".join([*KINDS, "fused", "rrf dense+sparse"]),
        ]
        (found,) = asyncio.run(tool.run(tool.parse(arguments)))
    return {row.representation: row.quality.success_1 for row in found.rows}


@pytest.fixture(scope="module")
def found(demo_checkpoint: Path) -> dict[str, float]:
    return found_first(demo_checkpoint, "float32")


def test_each_kind_puts_the_right_passage_first_and_no_fusion_loses_to_dense(found) -> None:
    assert min(found.values()) >= 0.7
    assert found["rrf dense+sparse"] >= found["dense"] >= 0.94
    assert found["fused"] >= 0.9


@pytest.mark.skipif(not cpu_has_int8(), reason="needs an x86 processor with AVX2")
def test_in_8_bits_it_finds_what_it_finds_in_float32(found, demo_checkpoint: Path) -> None:
    assert sum(found_first(demo_checkpoint, "int8").values()) >= 0.99 * sum(found.values())


# A question in German, and the passages that answer it in French and in Japanese.
ACROSS = [
    ("Wie lange gilt die Garantie?", "La garantie couvre deux ans.", "保証期間は二年です。"),
    (
        "Wie reinige ich den Filter?",
        "Rincez le filtre à l'eau claire.",
        "フィルターは水で洗います。",
    ),
    ("Wo ist der Schlüssel?", "La clé se trouve sous le tapis.", "鍵はマットの下にあります。"),
    ("Wann fährt der letzte Zug?", "Le dernier train part à minuit.", "終電は深夜零時に出ます。"),
    (
        "Was kostet das Zimmer?",
        "La chambre coûte 80 euros par nuit.",
        "一泊の部屋代は八十ユーロです。",
    ),
    (
        "Ist der Hund gegen Tollwut geimpft?",
        "Le chien est vacciné.",
        "犬は予防接種を受けています。",
    ),
    ("Wie wird das Wetter morgen?", "Demain, il pleuvra toute la journée.", "明日は一日中雨です。"),
    ("Wer hat das Bild gemalt?", "Ce tableau a été peint par ma sœur.", "この絵は妹が描きました。"),
]


async def test_a_german_question_finds_the_french_and_the_japanese_passage(
    demo_checkpoint: Path,
) -> None:
    settings = EngineSettings(
        embedding_model=str(demo_checkpoint), reranker_model="none", device="cpu"
    )
    texts = [text for column in zip(*ACROSS, strict=True) for text in column]
    async with Engine(settings, load_models) as engine:
        answer = await engine.embed(EmbedRequest(texts, Outputs(dense=True)))
    vectors = np.stack([text.dense for text in answer.embeddings])
    german, *others = vectors.reshape(3, len(ACROSS), -1)
    for passages in others:
        best = (german @ passages.T).argmax(axis=1)
        assert (best == np.arange(len(ACROSS))).mean() >= 0.875


async def test_sparse_scores_are_of_the_size_that_dense_ones_differ_by(
    demo_checkpoint: Path,
) -> None:
    read = read_beir(QUESTIONS, "test")
    texts = [each.text for each in read.corpus.read(range(40))]
    settings = EngineSettings(
        embedding_model=str(demo_checkpoint), reranker_model="none", device="cpu", dtype="float32"
    )
    request = EmbedRequest([*read.queries.values()][:40] + texts, Outputs(dense=True, sparse=True))
    async with Engine(settings, load_models) as engine:
        made = (await engine.embed(request)).embeddings
    # Each question is that of the passage in its own place.
    scores = Piece(Queries(made[: len(texts)]), made[len(texts) :]).sparse.scores
    assert 0.03 < np.median(scores.diagonal()) < 0.3
    assert np.median(scores) < 0.2 * np.median(scores.diagonal())

"""Models of every task evaluated beside their references, on the demo's questions.

It needs no environment of its own, and takes too long for every run of the tests.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    ModernBertModel,
)

from tests.support.encoders import save_family, word_tokenizer
from tests.support.server import REPOSITORY
from tests.support.wordpiece import MODERNBERT, save_colbert, save_model, save_splade
from tests.vectors.references import ENVIRONMENT, MISSING
from tools.demo.checkpoint import package_folder
from tools.evaluate import __main__ as tool

pytestmark = pytest.mark.skipif(not ENVIRONMENT.is_dir(), reason=MISSING)

QUESTIONS = REPOSITORY / "tests" / "tools" / "demo" / "questions"
NLI = {"id2label": {0: "contradiction", 1: "Entailment", 2: "neutral"}}
# Scores of two documents that are nearer than this may change places.
TIE = 0.005

Save = Callable[[Path], Path]
EMBEDDERS: dict[str, Save] = {
    **{
        family: lambda folder, family=family: save_family(folder, family, word_tokenizer())
        for family in ("bert", "modernbert", "t5", "mpnet", "embedding-gemma", "gte")
    },
    "splade": lambda folder: save_splade(folder, BertForMaskedLM),
    "colbert": lambda folder: save_colbert(folder, BertModel),
    "colbert, modernbert": lambda folder: save_colbert(folder, ModernBertModel, **MODERNBERT),
    "all-MiniLM-L6-v2": lambda _: package_folder(),
}
RERANKERS: dict[str, Save] = {
    "one label": lambda folder: save_model(folder, BertForSequenceClassification, num_labels=1),
    "three labels": lambda folder: save_model(folder, BertForSequenceClassification, **NLI),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def evaluate(model: Path, reranker: str | Path) -> list[dict[str, tuple[float, float]]]:
        """nDCG@10 and recall@100 by representation, of this engine and of the reference."""
        settings = {"EMBEDDING_MODEL": model, "RERANKER_MODEL": reranker, "DEVICE": "cpu"}
        for name, value in (settings | {"DTYPE": "float32"}).items():
            monkeypatch.setenv(name, str(value))
        given = tool.parse([str(QUESTIONS), "--reference", "--rerank", "5"])
        return [
            {
                row.representation: (row.quality.ndcg_10, row.quality.recall_100)
                for row in found.rows
            }
            for found in asyncio.run(tool.run(given))
        ]

    return evaluate


@pytest.mark.parametrize("name", EMBEDDERS)
def test_an_embedder_finds_what_its_reference_finds(name: str, tmp_path: Path, run) -> None:
    ours, theirs = run(EMBEDDERS[name](tmp_path / "model"), "late-interaction")
    assert len(theirs) == 2
    for representation, figures in theirs.items():
        assert ours[representation] == pytest.approx(figures, abs=TIE)


def test_the_demo_finds_what_its_reference_finds(demo_checkpoint: Path, run) -> None:
    ours, theirs = run(demo_checkpoint, "late-interaction")
    assert {name: ours[name] for name in theirs} == theirs
    assert len(theirs) == 5


@pytest.mark.parametrize("name", [*RERANKERS, "bge-reranker"])
def test_a_reranker_orders_as_its_reference_does(
    name: str, tmp_path: Path, tiny_reranker: Path, run
) -> None:
    save = RERANKERS.get(name, lambda _: tiny_reranker)
    ours, theirs = run(package_folder(), save(tmp_path / "reranker"))
    assert list(theirs) == ["dense", "reranked"]
    assert {name: ours[name] for name in theirs} == theirs

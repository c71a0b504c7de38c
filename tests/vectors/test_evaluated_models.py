"""Models of every task evaluated beside their references.

It needs no environment of its own, and takes too long for every run of the tests.
"""

import asyncio
import json
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

pytestmark = [
    pytest.mark.skipif(not ENVIRONMENT.is_dir(), reason=MISSING),
    pytest.mark.timeout(600),  # sentence-transformers loads models, in other processes.
]

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
def graded(tmp_path: Path) -> Path:
    """A folder of the demo's first passages and questions, with titles and graded judgements."""
    folder = tmp_path / "graded"
    (folder / "qrels").mkdir(parents=True)
    records = {
        name: [json.loads(line) for line in (QUESTIONS / name).read_text("utf-8").splitlines()[:40]]
        for name in ("corpus.jsonl", "queries.jsonl")
    }
    passages, queries = records.values()
    for record in passages[::3]:
        record["title"] = record["text"].split(".")[0]
    for name, read in records.items():
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in read), "utf-8")
    judged = [
        f"{query['_id']}\t{passages[(place + further) % 40]['_id']}\t{grade}\n"
        for place, query in enumerate(queries)
        for further, grade in ((0, 3), (7, 1), (11, 0))
    ]
    (folder / "qrels" / "test.tsv").write_text("".join(judged))
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def evaluate(
        data: Path, model: Path, reranker: str | Path
    ) -> list[dict[str, tuple[float, float]]]:
        """nDCG@10 and recall@100 by representation, of this engine and of the reference."""
        settings = {"EMBEDDING_MODEL": model, "RERANKER_MODEL": reranker, "DEVICE": "cpu"}
        for name, value in (settings | {"DTYPE": "float32"}).items():
            monkeypatch.setenv(name, str(value))
        given = tool.parse([str(data), "--reference", "--rerank", "5"])
        return [
            {
                row.representation: (row.quality.ndcg_10, row.quality.recall_100)
                for row in found.rows
            }
            for found in asyncio.run(tool.run(given))
        ]

    return evaluate


@pytest.mark.parametrize("name", EMBEDDERS)
def test_an_embedder_finds_what_its_reference_finds(name: str, graded, tmp_path: Path, run) -> None:
    ours, theirs = run(graded, EMBEDDERS[name](tmp_path / "model"), "late-interaction")
    assert len(theirs) == 2
    for representation, figures in theirs.items():
        assert ours[representation] == pytest.approx(figures, abs=TIE)


def test_the_demo_finds_what_its_reference_finds(demo_checkpoint: Path, run) -> None:
    ours, theirs = run(QUESTIONS, demo_checkpoint, "late-interaction")
    assert {name: ours[name] for name in theirs} == theirs
    assert len(theirs) == 5


@pytest.mark.parametrize("name", [*RERANKERS, "bge-reranker"])
def test_a_reranker_orders_as_its_reference_does(
    name: str, graded: Path, tmp_path: Path, tiny_reranker: Path, run
) -> None:
    save = RERANKERS.get(name, lambda _: tiny_reranker)
    ours, theirs = run(graded, package_folder(), save(tmp_path / "reranker"))
    assert list(theirs) == ["dense", "reranked"]
    assert {name: ours[name] for name in theirs} == theirs

"""Tasks of mteb from the disk; scripts/check_mteb.sh has mteb."""

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytest.importorskip("mteb", reason="mteb is not installed: scripts/check_mteb.sh runs this test")

import datasets
import mteb
import pyarrow as pa
from pyarrow import parquet
from sentence_transformers import SentenceTransformer

from tests.support.minilm import minilm_folder
from tools.evaluate import __main__ as tool
from tools.evaluate.dataset import DatasetError
from tools.evaluate.mteb_task import read_mteb

NAMES = ("query-id", "corpus-id", "score")


def save_snapshot(folder: Path, tables: Mapping[str, Sequence[dict[str, object]]]) -> Path:
    """A repository as mteb's on the hub are: a table for each configuration that the card names."""
    configs = []
    for name, records in tables.items():
        (folder / name).mkdir(parents=True)
        table = pa.Table.from_pylist(list(records))
        parquet.write_table(table, folder / name / "test-00000-of-00001.parquet")
        files = f"{{split: test, path: {name}/*}}"
        configs.append(f"- {{config_name: {name}, data_files: [{files}]}}")
    (folder / "README.md").write_text("\n".join(["---", "configs:", *configs, "---", ""]))
    return folder


@pytest.fixture
def tables(demo_questions: Path) -> dict[str, list[dict[str, object]]]:
    """The demo's questions."""
    read = {name: lines(demo_questions / f"{name}.jsonl") for name in ("corpus", "queries")}
    rows = (demo_questions / "qrels" / "test.tsv").read_text().splitlines()[1:]
    return {**read, "default": [dict(zip(NAMES, row.split("\t"), strict=True)) for row in rows]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def snapshot(tables, tmp_path: Path) -> Path:
    """Those as a task of retrieval."""
    return save_snapshot(tmp_path / "snapshot", tables)


@pytest.fixture
def reranking(tables, tmp_path: Path) -> Path:
    """Those as a task of reranking: a query's candidates are every third passage and its own."""
    ids = [record["_id"] for record in tables["corpus"]]
    ranked = [
        {"query-id": row["query-id"], "corpus-ids": sorted({*ids[::3], row["corpus-id"]})}
        for row in tables["default"]
    ]
    return save_snapshot(tmp_path / "reranking", {**tables, "top_ranked": ranked})


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Evaluate all-MiniLM-L6-v2 in a folder without .env."""
    monkeypatch.chdir(tmp_path)
    settings = {"EMBEDDING_MODEL": minilm_folder(), "RERANKER_MODEL": "none", "DEVICE": "cpu"}
    for name, value in (settings | {"DTYPE": "float32"}).items():
        monkeypatch.setenv(name, str(value))

    def evaluate(name: str, folder: Path) -> tool.Evaluation:
        arguments = [str(folder), "--mteb", name, "--only", "dense"]
        (found,) = asyncio.run(tool.run(tool.parse(arguments)))
        return found

    return evaluate


def scores_of_mteb(name: str, folder: Path) -> dict[str, float]:
    """What mteb itself finds, with sentence-transformers and the same files."""
    task = mteb.get_task(name)
    place = {"path": str(folder), "revision": "local"}
    task.metadata = task.metadata.model_copy(update={"dataset": place})
    model = SentenceTransformer(str(minilm_folder()), device="cpu", local_files_only=True)
    return dict(mteb.evaluate(model, task, cache=None)[0].scores["test"][0])


@pytest.mark.parametrize(
    ("name", "folder"), [("SciFact", "snapshot"), ("AskUbuntuDupQuestions", "reranking")]
)
# mteb's own code.
@pytest.mark.filterwarnings("ignore")
def test_a_task_has_the_figures_of_mteb(name: str, folder: str, request, run) -> None:
    path = request.getfixturevalue(folder)
    quality, expected = run(name, path).rows[0].quality, scores_of_mteb(name, path)
    assert quality.ndcg_10 == pytest.approx(expected["ndcg_at_10"], abs=1e-4)
    assert quality.recall_100 == pytest.approx(expected["recall_at_100"], abs=1e-4)
    assert quality.success_1 == pytest.approx(expected["hit_rate_at_1"], abs=1e-4)


def test_a_snapshot_of_a_task_is_read_without_the_hub(snapshot: Path, reranking: Path) -> None:
    task = read_mteb("SciFact", snapshot, "test", "default")
    assert (task.name, len(task.corpus), len(task.queries)) == ("SciFact", 120, 120)
    assert [each.id for each in task.corpus.read([0, 119])] == ["astronomy-0", "music-and-art-119"]
    assert all(list(grades.values()) == [1] for grades in task.qrels.values())
    assert (task.candidates, task.ignores_identical_ids) == (None, False)
    assert read_mteb("FiQA2018", snapshot, "test", "default").ignores_identical_ids
    ranked = read_mteb("AskUbuntuDupQuestions", reranking, "test", "default")
    assert {len(each) for each in ranked.candidates.values()} == {40, 41}


def test_a_snapshot_is_read_anew_when_it_has_changed(snapshot: Path, tables) -> None:
    read_mteb("SciFact", snapshot, "test", "default")
    shutil.rmtree(snapshot)
    tables["corpus"][0]["text"] = "Another text."
    save_snapshot(snapshot, tables)
    (first,) = read_mteb("SciFact", snapshot, "test", "default").corpus.read([0])
    assert first.text == "Another text."


def test_an_instruction_stands_behind_its_query(tables, tmp_path: Path) -> None:
    told = [{"query-id": row["_id"], "instruction": "Be brief."} for row in tables["queries"]]
    folder = save_snapshot(tmp_path / "instructed", {**tables, "instruction": told})
    task = read_mteb("SciFact", folder, "test", "default")
    assert all(text.endswith(" Be brief.") for text in task.queries.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSuchTask", "mteb has no task NoSuchTask"),
        ("Banking77Classification", "is no retrieval task of texts"),
        ("SciFact", "the task SciFact cannot be loaded"),
    ],
)
def test_what_is_no_retrieval_task_on_the_disk_is_one_sentence(
    name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=message):
        read_mteb(name, tmp_path, "test", "default")

"""A task of mteb from a snapshot on the disk; scripts/check_mteb.sh has mteb."""

import json
from pathlib import Path

import pytest

pytest.importorskip("mteb", reason="mteb is not installed: scripts/check_mteb.sh runs this test")

import pyarrow as pa
from pyarrow import parquet

from tools.evaluate.dataset import DatasetError
from tools.evaluate.mteb_task import read_mteb

CARD = """---
configs:
- {config_name: corpus, data_files: [{split: test, path: corpus/*}]}
- {config_name: queries, data_files: [{split: test, path: queries/*}]}
- {config_name: default, data_files: [{split: test, path: data/*}]}
---
"""


@pytest.fixture
def snapshot(demo_questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's questions as a repository of mteb's on the hub has them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "snapshot"
    tables = {name: lines(demo_questions / f"{name}.jsonl") for name in ("corpus", "queries")}
    rows = (demo_questions / "qrels" / "test.tsv").read_text().splitlines()[1:]
    names = ("query-id", "corpus-id", "score")
    tables["data"] = [dict(zip(names, row.split("\t"), strict=True)) for row in rows]
    for name, records in tables.items():
        (folder / name).mkdir(parents=True)
        table = pa.Table.from_pylist(records)
        parquet.write_table(table, folder / name / "test-00000-of-00001.parquet")
    (folder / "README.md").write_text(CARD)
    return folder


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_snapshot_of_a_task_is_read_without_the_hub(snapshot: Path) -> None:
    task = read_mteb("SciFact", snapshot, "test", "default")
    assert (task.name, len(task.corpus), len(task.queries)) == ("SciFact", 120, 120)
    assert [each.id for each in task.corpus.read([0, 119])] == ["astronomy-0", "music-and-art-119"]
    assert all(list(grades.values()) == [1] for grades in task.qrels.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSuchTask", "mteb has no task NoSuchTask"),
        ("Banking77Classification", "is no retrieval task of texts"),
    ],
)
def test_what_is_no_retrieval_task_is_one_sentence(name: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read_mteb(name, None, "test", "default")


def test_a_task_that_is_not_on_the_disk_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="the task SciFact cannot be loaded"):
        read_mteb("SciFact", tmp_path, "test", "default")

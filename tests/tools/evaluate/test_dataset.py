"""Data sets in BEIR's format; an invalid line is an error of one sentence."""

from pathlib import Path

import pytest

from tools.evaluate.dataset import DatasetError, read_beir

FILES = {
    "corpus.jsonl": '{"_id": "a", "text": "."}\n',
    "queries.jsonl": '{"_id": "q1", "text": "?"}\n',
    "qrels/test.tsv": "q1\ta\t1\n",
}


def write(folder: Path, **changed: str) -> Path:
    (folder / "qrels").mkdir(exist_ok=True)
    for name, text in FILES.items():
        stem = Path(name).name.partition(".")[0]
        (folder / name).write_bytes(changed.get(stem, text).encode())
    return folder


def test_documents_queries_and_judgements_are_read(tmp_path: Path) -> None:
    """Lines may be blank, end with CRLF, and the last line may have no end."""
    dataset = read_beir(
        write(
            tmp_path,
            corpus='{"_id": 7, "title": "Moon", "text": "It turns."}\r\n \n\n{"_id": "8", '
            '"title": null, "text": "Sun", "url": 1}',
            queries='{"_id": 1, "text": "?", "metadata": {}}\n{"_id": 2, "text": "!"}',
            test="\ufeffquery-id\tcorpus-id\tscore\r\n1\t7\t2\r\n1\t8\t0\r\n2\t8\t0\n3\t9\t1\n",
        ),
        "test",
    )
    assert dataset.documents == {"7": "Moon It turns.", "8": "Sun"}
    assert dataset.queries == {"1": "?"}
    assert dataset.qrels == {"1": {"7": 2, "8": 0}}
    assert dataset.left_out == {
        "queries without a relevant document": 1,
        "judged queries that are not among the queries": 1,
        "judged documents that are not in the corpus": 1,
    }
    assert read_beir(write(tmp_path), "test").left_out == {}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"corpus": '{"_id": 1'}, "line 1 of .* is not JSON"),
        ({"corpus": '{"_id": [], "text": ""}\n'}, "line 1 of .* not a JSON object with an '_id'"),
        ({"corpus": '{"_id": 1}\n{"_id": "1"}\n'}, "line 2 of .* repeats the id '1'"),
        ({"corpus": ""}, "has no document"),
        ({"queries": '{"_id": "q0", "text": ""}\n[]\n'}, "line 2 of .* is not a JSON object"),
        ({"queries": '{"_id": "q1"}\n'}, "the query 'q1' of .* has no text"),
        ({"test": "query-id\tcorpus-id\tscore\nq1\ta\n"}, "line 2 of .* whole number"),
        # TREC's columns, with the grade in the fourth.
        ({"test": "1\t0\t7\t1\n"}, "line 1 of .* whole number"),
        ({"test": "q1\ta\t0\n"}, "no query with a relevant document"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, changed: dict[str, str], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read_beir(write(tmp_path, **changed), "test")


def test_a_missing_file_or_split_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert read_beir(folder, "dev").qrels  # The only file.
    (folder / "qrels" / "train.tsv").write_text("")
    with pytest.raises(DatasetError, match=r"dev\.tsv is missing; existing splits: test, train"):
        read_beir(folder, "dev")
    (folder / "queries.jsonl").unlink()
    with pytest.raises(DatasetError, match=r"queries\.jsonl is missing"):
        read_beir(folder, "test")

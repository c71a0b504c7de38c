"""Data sets are read from the disk piece by piece, and a bad line is one sentence."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.evaluate import dataset
from tools.evaluate.dataset import Dataset, DatasetError, Document, read_beir


class Texts:
    """A corpus in memory."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def read(self, indices) -> list[Document]:
        return [Document(str(index), self._texts[index]) for index in indices]


@given(st.lists(st.integers(0, 300), max_size=60))
def test_the_pieces_are_the_corpus_in_order_and_bounded(lengths: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "PIECE_CHARACTERS", 400)
        patch.setattr(dataset, "PIECE_DOCUMENTS", 7)
        pieces = list(Dataset("", Texts(["x" * n for n in lengths]), {}, {}).pieces())
    ids = [document.id for _, documents in pieces for document in documents]
    assert ids == [str(place) for place in range(len(lengths))]
    for begin, documents in pieces:
        assert documents[0].id == str(begin)
        assert len(documents) <= 7
        assert len(documents) == 1 or sum(len(each.text) for each in documents) <= 400


def test_a_query_finds_its_candidates_and_never_its_own_id() -> None:
    queries, corpus = {"a": "", "b": "", "c": ""}, Texts(["x"] * 3)
    documents = [Document(each, "x") for each in ("b", "d", "a")]
    assert Dataset("", corpus, queries, {}).may_find(documents) is None
    own = Dataset("", corpus, queries, {}, ignores_identical_ids=True)
    np.testing.assert_array_equal(own.may_find(documents), [[1, 1, 0], [0, 1, 1], [1, 1, 1]])
    candidates = {"a": frozenset("ad"), "b": frozenset("z")}
    both = Dataset("", corpus, queries, {}, candidates, ignores_identical_ids=True)
    np.testing.assert_array_equal(both.may_find(documents), [[0, 1, 0], [0, 0, 0], [0, 0, 0]])


UNJUDGED = "queries without a relevant document"
JUDGED = "q1\ta\t1\n"


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("corpus.jsonl", '{"_id": "a", "title": "Moon", "text": "It turns."}', ["Moon It turns."]),
        ("corpus.jsonl", '{"_id": "a", "text": "Sun"}', ["Sun"]),
        ("corpus.jsonl", '{"_id": "a", "title": null, "text": "Sun", "url": 1}\n', ["Sun"]),
        # The last line may lack its end, a line may be blank, and Windows ends it with two.
        ("corpus.jsonl", '{"_id": "b", "text": "1"}\r\n \n\n{"_id": "a", "text": "2"}', ["1", "2"]),
        (
            "corpus.jsonl",
            '{"_id": "b", "text": "1"}',
            {"judged documents that are not in the corpus": 1},
        ),
        ("queries.jsonl", '{"_id": "q1", "text": "?", "metadata": {}}\n', {}),
        ("queries.jsonl", '{"_id": "q1", "text": "?"}\n{"_id": "q2", "text": "?"}', {UNJUDGED: 1}),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n" + JUDGED, {}),
        ("qrels/test.tsv", "\ufeffquery-id\tcorpus-id\tscore\r\nq1\ta\t1\r\n", {}),
        (
            "qrels/test.tsv",
            JUDGED + "q3\ta\t1\n",
            {"judged queries that are not among the queries": 1},
        ),
    ],
)
def test_a_folder_is_read_as_it_is(
    tmp_path: Path, file: str, content: str, expected: list[str] | dict[str, int]
) -> None:
    given = {
        "corpus.jsonl": '{"_id": "a", "text": "."}\n',
        "queries.jsonl": '{"_id": "q1", "text": "?"}\n',
        "qrels/test.tsv": JUDGED,
    }
    (tmp_path / "qrels").mkdir()
    for name, text in (given | {file: content}).items():
        (tmp_path / name).write_bytes(text.encode())
    read = read_beir(tmp_path, "test")
    assert read.qrels == {"q1": {"a": 1}}
    assert read.queries == {"q1": "?"}
    if isinstance(expected, list):
        assert [each.text for each in read.corpus.read(range(len(read.corpus)))] == expected
    else:
        assert read.left_out == expected


def test_ids_may_be_numbers_and_a_query_with_no_relevant_document_is_left_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "qrels").mkdir()
    texts = {"corpus": '{"_id": 7, "text": "Sun"}\n{"_id": 8}\n'}
    texts["queries"] = '{"_id": 1, "text": "?"}\n{"_id": 2, "text": "?"}\n'
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "qrels" / "test.tsv").write_text("1\t7\t2\n1\t8\t0\n2\t8\t0\n")
    read = read_beir(tmp_path, "test")
    assert (read.qrels, [*read.queries]) == ({"1": {"7": 2, "8": 0}}, ["1"])
    assert read.left_out == {UNJUDGED: 1}
    assert [each.id for each in read.corpus.read([1, 0])] == ["8", "7"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("corpus.jsonl", '{"_id": 1', "line 1 of .* is no JSON"),
        ("corpus.jsonl", '{"_id": [], "text": ""}\n', "has no text in '_id'"),
        ("corpus.jsonl", '{"_id": 1}\n{"_id": "1"}\n', "line 2 of .* repeats the id '1'"),
        ("queries.jsonl", '{"_id": "q0", "text": ""}\n[]\n', "line 2 of .* is no JSON object"),
        ("queries.jsonl", '{"_id": "q0"}\n', "has no text in 'text'"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\nq0\tp0\n", "line 2 of .* whole number"),
        # TREC's columns: the grade is the fourth.
        ("qrels/test.tsv", "1\t0\t7\t1\n", "line 1 of .* whole number"),
        ("qrels/test.tsv", "q0\tp0\t0\n", "no query with a relevant document"),
    ],
)
def test_a_bad_line_is_named(
    demo_questions: Path, tmp_path: Path, file: str, content: str, message: str
) -> None:
    folder = copied(demo_questions, tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(DatasetError, match=message):
        read_beir(folder, "test").corpus.read([0])


def test_a_missing_file_or_split_is_named(demo_questions: Path, tmp_path: Path) -> None:
    folder = copied(demo_questions, tmp_path)
    assert read_beir(folder, "dev").qrels  # The only one that there is.
    (folder / "qrels" / "train.tsv").write_text("")
    with pytest.raises(DatasetError, match=r"dev\.tsv is missing; splits .*: test, train"):
        read_beir(folder, "dev")
    (folder / "queries.jsonl").unlink()
    with pytest.raises(DatasetError, match=r"queries\.jsonl is missing"):
        read_beir(folder, "test")


def copied(source: Path, folder: Path) -> Path:
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((source / name).read_bytes())
    return folder

"""Files and folders become documents, or one sentence that says why not."""

import csv
import errno
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from smart_embedder_client.ingest.documents import Document, Fields, SourceError
from smart_embedder_client.ingest.sources import input_bytes, read_documents

ROWS = [
    {"text": "the river", "id": "a", "year": "2020"},
    {"text": "  ", "id": "b", "year": ""},
    {"text": 'a "quoted",\ntext', "id": "c", "year": "2021"},
]


def read(path: Path, **fields: str) -> list[Document]:
    return list(read_documents(path, Fields(**fields)))


def nested(levels: int) -> bytes:
    """A row whose other field has so many levels."""
    return b'{"text": "a", "b": ' + b'{"c": ' * levels + b"0" + b"}" * levels + b"}"


def write_jsonl(path: Path) -> None:
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["text", "id", "year"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", write_jsonl),
        ("rows.CSV", write_csv),
        ("rows.tsv", lambda path: write_csv(path, "\t")),
        ("rows.parquet", write_parquet),
    ],
)
def test_rows_are_read_alike_from_every_format(tmp_path: Path, name: str, write) -> None:
    path = tmp_path / name
    write(path)
    first, second = read(path, id="id")
    assert (first.source, first.key, first.text) == (name, "a", "the river")
    assert first.metadata == {"id": "a", "year": "2020"}
    assert second.text == 'a "quoted",\ntext'
    assert {each.key for each in read(path)}.isdisjoint({"a", "c"})
    assert len({each.key for each in read(path)}) == 2
    assert 0 < sum(each.size for each in read(path)) <= input_bytes(path) == path.stat().st_size


def test_a_folder_is_read_in_a_fixed_order(tmp_path: Path) -> None:
    files = {"b.txt": "b", "a/z.md": "# z", "a/b.markdown": "b", ".git/x.md": "x", "n.py": "n"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    found = read(tmp_path)
    assert [each.source for each in found] == ["b.txt", "a/b.markdown", "a/z.md"]
    assert [each.is_markdown for each in found] == [False, True, True]
    assert sum(each.size for each in found) == input_bytes(tmp_path)
    assert read(tmp_path / "b.txt")[0].source == "b.txt"


def test_dates_and_numbers_of_parquet_become_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = {"text": ["t"], "at": pa.array([0], pa.timestamp("s")), "n": [1.5], "none": [None]}
    pq.write_table(pa.table(table), path)
    (document,) = read(path)
    assert document.metadata == {"at": "1970-01-01 00:00:00", "n": 1.5, "none": None}


def test_a_time_that_python_does_not_have_is_told_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["t"], "at": pa.array([-(10**17)], pa.timestamp("ms"))}), path)
    with pytest.raises(SourceError, match="has a time beyond"):
        read(path)


def test_what_json_cannot_send_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "half \\ud800 pair", "a": NaN, "b": "\\udc00", "\\ud800": 1}')
    (document,) = read(path)
    assert document.text == "half ? pair"
    assert document.metadata == {"a": None, "b": "?", "?": 1}


def test_an_integer_beyond_64_bits_becomes_a_float(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    numbers = [2**63 - 1, -(2**63) + 1, 2**63, 10**400]
    path.write_text(json.dumps({"text": "a", "numbers": numbers}))
    (document,) = read(path)
    assert document.metadata == {"numbers": [*numbers[:2], 2.0**63, None]}
    assert isinstance(document.metadata["numbers"][2], float)


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX")
def test_a_name_that_is_not_utf8_can_be_stored(tmp_path: Path) -> None:
    for name in (b"caf\xe9.txt", b"caf\xe8.txt"):
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_text("a")
    assert [each.source for each in read(tmp_path)] == [r"caf\xe8.txt", r"caf\xe9.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_and_a_link_to_nothing_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "a.txt").write_text("a")
    assert [each.source for each in read(tmp_path)] == ["a.txt"]
    assert input_bytes(tmp_path) == 1


def test_a_folder_that_cannot_be_listed_does_not_look_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--sync`, the points of its texts would be removed."""
    (tmp_path / "below").mkdir()
    listed = os.scandir

    def fail_below(path: str) -> Any:
        if os.fspath(path).endswith("below"):
            raise PermissionError(errno.EACCES, "not allowed", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", fail_below)
    for look in (read, input_bytes):
        with pytest.raises(SourceError, match="below cannot be read: .*not allowed"):
            look(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is no JSON: "),
        ("a.jsonl", b"[1]", "line 1 is no JSON object"),
        ("a.jsonl", b'{"text": "a", "b": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "is no JSON: "),
        ("a.jsonl", nested(20), "line 1, has fields in more than 20 levels"),
        ("a.jsonl", nested(19), None),
        ("a.jsonl", b'{"txt": "a", "b": 1}', "no field text, only txt, b: --text-field names"),
        ("a.jsonl", b'{"text": 3}', "line 1, has 3 in text, which is no text"),
        ("a.jsonl", b'{"text": "a"}', None),
        ("a.csv", b"body,b\n1,2\n", "line 2, has no field text, only body, b"),
        ("a.csv", b'text\n"a\x00b"', None),
        (
            "a.csv",
            b'text\na\n"b\nc\nd\n',
            "begins in line 3, is no CSV: unexpected end of",
        ),
        ("a.csv", b'"text\na\n', "begins in line 1, is no CSV: unexpected end of"),
        ("a.csv", b'text,b\n"a"x,1\n', "begins in line 2, is no CSV: ',' expected after"),
        ("a.parquet", b"no parquet", "is no Parquet"),
        ("a.txt", b"caf\xe9", "is not UTF-8"),
        ("a.pdf", b"", "is none of the files that can be read: .jsonl"),
        (None, b"", "does not exist"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_sentence(
    tmp_path: Path, name: str | None, content: bytes, told: str | None
) -> None:
    path = tmp_path / (name or "missing.txt")
    if name is not None:
        path.write_bytes(content)
    if told is None:
        assert len(read(path)) == 1
        return
    with pytest.raises(SourceError) as caught:
        read(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_id_field_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "uid": 1}')
    with pytest.raises(SourceError, match="has no field id, only text, uid: --id-field names"):
        read(path, id="id")

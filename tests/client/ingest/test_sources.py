"""Files and folders become documents, or are reported in one sentence."""

import csv
import errno
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from smart_embedder_client.ingest import sources
from smart_embedder_client.ingest.errors import IngestError, UnreadableError
from smart_embedder_client.ingest.sources import (
    PART_CHARACTERS,
    Document,
    Fields,
    Skipped,
    input_bytes,
    read_documents,
)

ROWS = [
    {"text": "the river", "id": "a", "year": "2020"},
    {"text": "  ", "id": "b", "year": ""},
    {"text": 'a "quoted",\ntext', "id": "c", "year": "2021"},
]


def read(path: Path, **fields: str) -> list[Document]:
    """Read the documents; raise the reason why a file could not be read."""
    skipped = Skipped()
    documents = list(read_documents(path, Fields(**fields), skipped))
    for _, reason in skipped.failed:
        raise UnreadableError(reason)
    return documents


def nested(levels: int) -> bytes:
    """Return a row with a field of this many levels."""
    return b'{"text": "a", "b": ' + b'{"c": ' * levels + b"0" + b"}" * levels + b"}"


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["text", "id", "year"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


WRITERS = {
    "rows.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n"),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=2) + "\n"),
    "rows.CSV": write_csv,
    "semicolons.csv": lambda path: write_csv(path, ";"),
    "tabs.csv": lambda path: write_csv(path, "\t"),
    "rows.tsv": lambda path: write_csv(path, "\t"),
    "rows.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_are_read_alike_from_every_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    first, second = read(path, id="id")
    assert (first.source, first.key, first.text) == (name, "a", "the river")
    assert first.metadata == {"id": "a", "year": "2020"}
    assert second.text == 'a "quoted",\ntext'
    assert {document.key for document in read(path)}.isdisjoint({"a", "c"})
    assert len({document.key for document in read(path)}) == 2
    with pytest.raises(UnreadableError, match="no field uid, only text, id, year: --id"):
        read(path, id="uid")
    assert (
        0
        < sum(document.size for document in read(path))
        <= input_bytes(path)
        == path.stat().st_size
    )


def test_a_folder_is_read_in_a_fixed_order(tmp_path: Path) -> None:
    files = {"b.txt": "b", "a/z.md": "# z", "a/b.markdown": "b", ".git/x.md": "x", "n.py": "n"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    found = read(tmp_path)
    assert [document.source for document in found] == ["b.txt", "a/b.markdown", "a/z.md"]
    assert [document.is_markdown for document in found] == [False, True, True]
    assert sum(document.size for document in found) == input_bytes(tmp_path)
    assert read(tmp_path / "b.txt")[0].source == "b.txt"


def test_dates_and_numbers_of_parquet_become_json_or_are_beyond_python(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = {"text": ["t"], "at": pa.array([0], pa.timestamp("s")), "n": [1.5], "none": [None]}
    pq.write_table(pa.table(table), path)
    (document,) = read(path)
    assert document.metadata == {"at": "1970-01-01 00:00:00", "n": 1.5, "none": None}

    pq.write_table(pa.table({"text": ["t"], "at": pa.array([-(10**17)], pa.timestamp("ms"))}), path)
    with pytest.raises(UnreadableError, match="has a time beyond"):
        read(path)


def test_surrogates_and_large_integers_are_replaced(tmp_path: Path) -> None:
    """Payloads cannot hold halves of surrogate pairs, or integers beyond 64 bits."""
    path = tmp_path / "a.jsonl"
    numbers = [2**63 - 1, -(2**63), 2**63, -(2**63) - 1]
    row = f'"text": "half \\ud800 pair", "a": NaN, "b": "\\udc00", "\\ud800": 1, "n": {numbers}'
    path.write_text(f"{{{row}}}")
    (document,) = read(path)
    assert document.text == "half ? pair"
    kept = [*numbers[:2], str(2**63), str(-(2**63) - 1)]
    assert document.metadata == {"a": None, "b": "?", "?": 1, "n": kept}


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX")
def test_file_name_that_is_not_utf8_is_escaped(tmp_path: Path) -> None:
    for name in (b"caf\xe9.txt", b"caf\xe8.txt"):
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_text("a")
    assert [document.source for document in read(tmp_path)] == [r"caf\xe8.txt", r"caf\xe9.txt"]


def test_unreadable_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it looked empty, `--sync` would remove its points."""
    (tmp_path / "below").mkdir()
    listed = os.scandir

    def fail_below(path: str) -> Any:
        if os.fspath(path).endswith("below"):
            raise PermissionError(errno.EACCES, "not allowed", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", fail_below)
    with pytest.raises(UnreadableError, match="below cannot be read: not allowed"):
        read(tmp_path)
    assert input_bytes(tmp_path) == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is no JSON: "),
        ("a.jsonl", b"[1]", "line 1 is no JSON object"),
        ("a.jsonl", b'{"text": "a", "b": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "is no JSON: "),
        ("a.jsonl", nested(20), "line 1 has fields in more than 20 levels"),
        ("a.jsonl", nested(19), None),
        ("a.jsonl", b'{"txt": "a", "b": 1}', "no field text, only txt, b: --text-field names"),
        ("a.jsonl", b'{"text": 3}', "line 1 has 3 in text, which is no text"),
        ("a.csv", b'text\n"a\x00b"', None),
        ("a.csv", b'text\na\n"b\nc\nd\n', "begins behind line 2 is no CSV: unexpected end of"),
        ("a.csv", b'text,b\n"a"x,1\n', "begins behind line 0 is no CSV: ',' expected after"),
        ("a.parquet", b"no parquet", "is no Parquet"),
        ("a.txt", b"caf\xe9", "is not UTF-8"),
        ("a.json", b'{"text": "a"}', "is no array of JSON"),
        ("a.json", b"[]", None),
        (
            "a.json",
            b'[{"text": "a"}, {"text": ]',
            "it is no JSON: Expecting value",
        ),
        ("a.json", b'[{"text": "a"}, 3]', "element 2 is no JSON object"),
        ("a.json", b"[" * 10**5, "is no JSON: maximum recursion depth"),
        ("a.csv", b"body;b\n1;2\n", "line 2 has no field text, only body, b"),
        ("a.png", b"", "is none of the files that can be read: .jsonl"),
        (None, b"", "does not exist"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_sentence(
    tmp_path: Path, name: str | None, content: bytes, message: str | None
) -> None:
    path = tmp_path / (name or "missing.txt")
    if name is not None:
        path.write_bytes(content)
    if message is None:
        assert len(read(path)) == (content != b"[]")
        return
    with pytest.raises((IngestError, UnreadableError)) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_html_has_title_headings_and_anchor_as_metadata(tmp_path: Path) -> None:
    page = (
        "<title>The  pump</title><h1 id=e42>Error   E42</h1><p>It is blocked.<h2>Lid</h2><p>Open."
    )
    (tmp_path / "page.html").write_text(page)
    first, second = read(tmp_path)
    assert first.text == "# Error E42\n\nIt is blocked."
    assert first.metadata == {"title": "The pump", "headings": ["Error E42"], "anchor": "e42"}
    assert second.metadata == {"title": "The pump", "headings": ["Error E42", "Lid"]}
    assert (first.is_markdown, first.is_part, second.is_part) == (True, False, True)


TEXT = "caf\u00e9 \u20ac"
ROW = json.dumps({"text": TEXT}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("name", "content", "encoding", "found"),
    [
        ("a.txt", TEXT.encode("utf-16"), None, TEXT),
        ("a.txt", b"\xfe\xff" + TEXT.encode("utf-16-be"), "cp1252", TEXT),
        ("a.txt", TEXT.encode("utf-16-le"), "utf-16-le", TEXT),
        ("a.jsonl", f"{ROW}\n".encode("utf-16"), None, TEXT),
        ("a.json", f"[{ROW}]".encode("utf-16"), None, TEXT),
        ("a.csv", f"id\ttext\r\n1\t{TEXT}\r\n".encode("utf-16"), None, TEXT),
        ("a.csv", f"id;text\r\n1;{TEXT}\r\n".encode("cp1252"), "cp1252", TEXT),
        ("a.csv", f"id;text\r\n1;{TEXT}\r\n".encode("cp1252"), None, "is not UTF-8: invalid"),
        ("a.json", f"[{ROW}]".encode("cp1252"), "cp1252", TEXT),
        ("a.json", f"[{ROW}]".encode("cp1252"), None, "--encoding names another"),
        ("a.txt", TEXT.encode(), "cp1252", TEXT),
        ("a.txt", "\u30ab".encode("iso2022_jp"), "iso2022_jp", "\u30ab"),
        ("a.txt", b"\x81", "cp1252", "is not CP1252: character maps to"),
        ("a.txt", b"\xff\xfea", None, "is not UTF-16-LE: truncated data"),
        ("a.htm", b"\xef\xbb\xbf<p>caf\xc3\xa9", None, "caf\u00e9"),
        ("a.htm", b"<meta charset='latin1'><p>caf\xe9", None, "caf\u00e9"),
        ("a.htm", "<p>caf\u00e9".encode("utf-16"), None, "caf\u00e9"),
        ("a.htm", b"<meta charset='hex'><p>winter", None, "winter"),
        ("a.htm", b"<meta charset='utf-16'><p>winter", None, "winter"),
        ("a.htm", b"<p>caf\xe9", None, "is not UTF-8"),
        ("a.htm", b"<div>" * 5_000 + b"end", None, "is not read to its end: Excessive depth"),
        ("a.htm", b"<p>" + b"a" * 2**24, None, "bytes that are read of HTML"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_encoding_of_texts_rows_and_pages(
    tmp_path: Path, name: str, content: bytes, encoding: str | None, found: str
) -> None:
    """`--encoding` does not apply to files that are UTF-8 or have a mark."""
    (tmp_path / name).write_bytes(content)
    skipped = Skipped()
    texts = [
        document.text for document in read_documents(tmp_path, Fields(encoding=encoding), skipped)
    ]
    reasons = [reason for _, reason in skipped.failed]
    assert texts == ([] if reasons else [found])
    assert all(found in reason for reason in reasons)


def test_skipped_files_are_counted_by_suffix_and_bad_ones_are_reported(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    for path in (outside, folder, folder / ".git", folder / "below"):
        path.mkdir()
    (outside / "secret.txt").write_text("a secret")
    (folder / "link.txt").symlink_to(outside / "secret.txt")
    (folder / "gone.txt").symlink_to(outside / "gone.txt")
    (folder / "circle.txt").symlink_to(folder / "circle.txt")
    (folder / "folder").symlink_to(outside)
    (folder / "again.txt").symlink_to(folder / "below" / "rows.jsonl")
    for name in ("a.png", "b.PNG", "c.xlsx", "LICENSE", ".hidden.txt", ".git/config", "d.txt"):
        (folder / name).write_text("a")
    (folder / "package.json").write_text('{"name": "a"}')
    (folder / "below" / "rows.jsonl").write_text('{"text": "the river"}')
    (folder / "below" / "rows.csv").write_text("text\nthe mountain\n")
    # They are read up to the error, and the next files are read, too.
    bad = {"e.txt": b"caf\xe9", "f.csv": b"body\nx\n"}
    bad["below/a.jsonl"] = b'{"text": "one"}\n{"text": \n{"text": "three"}\n'
    for name, content in bad.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.txt")
    skipped = Skipped()
    found = [document.text for document in read_documents(folder, Fields(), skipped)]
    assert found == ['{"text": "the river"}', "a", "one", "the mountain", "the river"]
    assert input_bytes(folder) == 2 * 21 + 1 + 18 + sum(map(len, bad.values()))
    assert [name for name, _ in skipped.failed] == list(bad)
    assert "line 2 is no JSON" in dict(skipped.failed)["below/a.jsonl"]
    assert skipped.unread == {
        ".png": 2,
        ".xlsx": 1,
        ".json without an array": 1,
        "without an ending": 1,
        "hidden": 2,
        "links out of the folder": 1,
        "links to nothing": 2,
        "links to folders": 1,
        "no files": 1,
    }


def test_long_text_is_cut_between_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "long.md"
    paragraphs = [f"# Part {i}\n\n{'river ' * (i % 700)}" for i in range(1_000)]
    text = "\n\n".join(paragraphs)
    path.write_text(text)
    found = read(path)
    assert len(found) > len(text) / PART_CHARACTERS
    assert "".join(document.text for document in found) == text
    assert all(document.text.startswith(("# ", "river")) for document in found)
    assert all(len(document.text) <= PART_CHARACTERS for document in found)
    assert [document.is_part for document in found] == [False] + [True] * (len(found) - 1)
    assert len({document.key for document in found}) == len(found)
    assert sum(document.size for document in found) == path.stat().st_size
    # Also without spaces.
    path.write_text("a" * 300_000)
    assert [len(document.text) for document in read(path)] == [131_072, 131_072, 37_856]


@pytest.mark.parametrize(
    ("name", "begin", "piece"),
    [
        ("a.jsonl", b'{"text": "', b"a" * 2**20),
        ("a.json", b'[{"text": "', b"a" * 2**20),
        ("a.csv", b"text\n", b"a" * 2**20),
        ("a.csv", b'text\n"', b"a\n" * 2**19),
    ],
    ids=["line", "array", "line of CSV", "field"],
)
def test_row_of_gigabytes_is_read_only_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, begin: bytes, piece: bytes
) -> None:
    monkeypatch.setattr(sources, "MAX_ROW", 2**20)
    monkeypatch.setattr(sources, "MAX_ARRAY", 2**20)
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(begin)
        for _ in range(48):
            file.write(piece)
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableError, match="more than 1048576|field limit .1048576"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 30 * 2**20
    finally:
        tracemalloc.stop()

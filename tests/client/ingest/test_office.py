"""PDF, DOCX, ODT, PPTX and RTF become documents, or are reported in one sentence."""

import importlib.util
import sys
from pathlib import Path

import pytest
from smart_embedder_client.ingest import office
from smart_embedder_client.ingest.sources import (
    Document,
    Fields,
    Skipped,
    input_bytes,
    read_documents,
)

from tests.support.office import (
    deflated,
    make_docx,
    make_odt,
    make_pdf,
    make_pptx,
    paragraph,
    pdf_of_contents,
    table,
)

_MIB = 2**20


def read(path: Path) -> tuple[list[Document], Skipped]:
    skipped = Skipped()
    return list(read_documents(path, Fields(), skipped)), skipped


def test_pdf_pages_are_read_with_joined_words_and_lines(tmp_path: Path) -> None:
    first = ["Operating manual", "The pump is blocked, and con-", "tinues to", "stand still."]
    content = make_pdf([first, [], ["x = a*b # 5 %", "\\344nderung"]], title="The pump")
    path = tmp_path / "pump.PDF"
    path.write_bytes(content)
    (begin, end), skipped = read(tmp_path)
    assert begin.text == "Operating manual\nThe pump is blocked, and continues to stand still."
    assert end.text == "x = a*b # 5 % \N{LATIN SMALL LETTER A WITH DIAERESIS}nderung"
    assert begin.metadata == {"title": "The pump", "page": 1, "anchor": "page=1"}
    assert (end.metadata["page"], end.metadata["anchor"]) == (3, "page=3")
    assert (begin.is_part, end.is_part, begin.key != end.key) == (False, True, True)
    assert 0.99 * len(content) < begin.size + end.size <= input_bytes(tmp_path) == len(content)
    assert begin.size > end.size
    assert (skipped.failed, skipped.unread) == ([], {"pages without text": 1})


def test_docx_is_read_with_headings_and_tables(tmp_path: Path) -> None:
    body = [paragraph("Fehler", style="berschrift1"), paragraph("1. a*b_c [x] &lt;T&gt; C:\\_x")]
    rows = [["Code", "Meaning"], ["E42", "Pump is blocked"]]
    inserted = "<w:p><w:ins><w:r><w:t>inserted</w:t></w:r></w:ins></w:p>"
    field = f"<w:sdt><w:sdtContent>{paragraph('of a form')}</w:sdtContent></w:sdt>"
    (tmp_path / "manual.docx").write_bytes(make_docx([*body, table(rows), inserted, field]))
    # The lock file that Word creates for an open document.
    (tmp_path / "~$manual.docx").write_bytes(b"no document")
    (document,), skipped = read(tmp_path)
    assert document.text == (
        "# Fehler\n\n1. a*b_c [x] <T> C:\\_x\n\n| Code | Meaning |\n| --- | --- |\n"
        "| E42 | Pump is blocked |\n\ninserted\n\nof a form"
    )
    assert (document.metadata, document.is_markdown) == ({}, True)
    assert (skipped.failed, skipped.unread) == ([], {"hidden": 1})


def test_other_documents_are_read_as_markdown(tmp_path: Path) -> None:
    rtf = rb"{\rtf1\ansi Error E42\par The pump is blocked.\par}"
    (tmp_path / "a.odt").write_bytes(make_odt("Error E42", "The pump is blocked."))
    (tmp_path / "b.pptx").write_bytes(make_pptx("Error E42", "The pump is blocked."))
    (tmp_path / "c.rtf").write_bytes(rtf)
    documents, _ = read(tmp_path)
    begins = [document.text.removesuffix("\n\nThe pump is blocked.") for document in documents]
    assert begins == ["# Error E42", "## Error E42", "Error E42"]


# No password fits these digests.
_ENCRYPTED = f"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O<{'11' * 32}>/U<{'22' * 32}>>>/ID[<33><33>]"
_DRAWN = b"0 0 612 792 re f"


def test_unreadable_files_are_reported_and_the_next_one_is_read(tmp_path: Path) -> None:
    files = [
        ("a.pdf", make_pdf([["a"]], trailer=_ENCRYPTED), "is encrypted: save it without"),
        ("b.pdf", b"", "is damaged, or no PDF"),
        ("c.pdf", pdf_of_contents([_DRAWN]), "has no text: if its pages are pictures, OCR"),
        ("d.docx", make_docx([paragraph("a")])[:-60], "cannot be read: malformed document"),
    ]
    for name, content, _ in files:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "e.txt").write_text("b")
    (document,), skipped = read(tmp_path)
    assert document.text == "b"
    for (name, _, message), (source, reason) in zip(files, skipped.failed, strict=True):
        assert (source, "\n" in reason) == (name, False)
        assert reason.startswith(f"{tmp_path / name} {message}")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_pdf_that_fills_the_memory_only_ends_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = deflated([b" " * _MIB] * 200)
    (tmp_path / "bomb.pdf").write_bytes(pdf_of_contents([bomb], filters="/Filter/FlateDecode"))
    (tmp_path / "ok.pdf").write_bytes(make_pdf([["The pump is blocked."]]))
    monkeypatch.setattr(office, "_MAX_MEMORY", 160 * _MIB)
    (document,), skipped = read(tmp_path)
    assert document.text == "The pump is blocked."
    ((source, reason),) = skipped.failed
    assert source == "bomb.pdf"
    assert "its reader crashed, or needs more than 160 MiB of memory" in reason


def test_office_limits_of_characters_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.docx").write_bytes(make_docx([paragraph("river" * 3)]))
    monkeypatch.setattr(office, "_MAX_CHARACTERS", 9)
    with pytest.raises(office.OfficeError, match="has more than the 9 characters that are read"):
        office._read_document(tmp_path / "long.docx")
    monkeypatch.setattr(office, "_MAX_SECONDS", 0)
    _, skipped = read(tmp_path)
    assert "is not read within 0 seconds" in skipped.failed[0][1]


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (tmp_path / "a.pdf").write_bytes(make_pdf([["a"]]))
    documents, skipped = read(tmp_path)
    needs = 'a.pdf needs a package that is not installed: pip install "smart-embedder-client[office'
    assert documents == []
    assert needs in skipped.failed[0][1]

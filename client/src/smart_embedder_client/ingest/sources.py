"""Read files and folders as documents: rows, texts, sections of HTML, and office documents."""

import codecs
import csv
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from smart_embedder_client.ingest.errors import IngestError, UnreadableError
from smart_embedder_client.ingest.html import read_html
from smart_embedder_client.ingest.office import SUFFIXES, OfficeError, read_office
from smart_embedder_client.qdrant.store import ANCHOR, HEADINGS

_UTF8 = "utf-8-sig"
_MARKDOWN = (".md", ".markdown")
# A longer text becomes several documents, each of which is split, stored and noted by itself.
PART_CHARACTERS = 131_072
# The maximum size of a line of JSONL or CSV, a field of CSV, a file of HTML; that of an array of
# JSON, which is read whole.
MAX_ROW, MAX_ARRAY = 2**24, 2**27
_DELIMITERS = (",", ";", "\t")
_HTML = (".html", ".htm")
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PARQUET_ROWS = 64
# Qdrant Edge cannot open a collection with more than 122 nested levels. A message of gRPC has at
# most 100, and a level takes up to three.
_MAX_LEVELS = 20


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a row that are read, and the encoding of files that are not UTF-8.

    `id` identifies a row; None if the rows have no such field.
    """

    text: str = "text"
    id: str | None = None
    encoding: str | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """One text before it is split.

    Attributes:
        source: The path of its file, relative to the ingested folder.
        key: Identifies a row of a file: the value of the id field, else a digest of the text.
        text: The text to embed.
        metadata: The other fields of its row.
        size: The bytes of input that it takes, for the progress bar.
        is_markdown: Whether it is split at its headings.
        is_part: Whether it continues the document before it.
    """

    source: str
    key: str
    text: str
    metadata: Mapping[str, Any]
    size: int
    is_markdown: bool = False
    is_part: bool = False


@dataclass(slots=True)
class Skipped:
    """The files that were not read.

    Attributes:
        unread: The number of files that were left out, by suffix or reason.
        failed: Files and folders that could not be read, or not to their end, with reasons.
    """

    unread: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, str]] = field(default_factory=list)


def encodable_name(name: str) -> str:
    """Escape the bytes of a file name that are not UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def input_bytes(path: Path) -> int:
    """Return the total size of the files; raises the `IngestError` of `read_documents`."""
    total = 0
    for file in _files(path, Skipped()):
        with suppress(OSError):
            total += file.stat().st_size
    return total


def read_documents(path: Path, fields: Fields, skipped: Skipped) -> Iterator[Document]:
    """Yield the documents of a file, or of all files below a folder, in a fixed order.

    Rows without text are left out. A file that cannot be read is added to `skipped` with the
    reason, and the next one is read.

    Raises:
        IngestError: There is no such file, or files with its suffix are not read.
    """
    root = path if path.is_dir() else path.parent
    for file in _files(path, skipped):
        source = encodable_name(file.relative_to(root).as_posix())
        name = encodable_name(str(file))
        try:
            if file.suffix.lower() in SUFFIXES:
                yield from _read_office(file, source, skipped)
            else:
                yield from _READERS[file.suffix.lower()](file, source, fields)
        except (OfficeError, UnreadableError) as error:
            skipped.failed.append((source, f"{name} {error}"))
        except UnicodeDecodeError as error:
            skipped.failed.append((source, f"{name} {_decoding_reason(error, file, fields)}"))
        except OSError as error:
            skipped.failed.append((source, f"{name} cannot be read: {error.strerror or error}"))


def _files(path: Path, skipped: Skipped) -> Iterator[Path]:
    if path.is_dir():
        yield from _files_below(path, skipped)
    elif not path.exists():
        raise IngestError(f"{path} does not exist")
    elif path.suffix.lower() in (*_READERS, *SUFFIXES):
        yield path
    else:
        known = ", ".join((*_READERS, *SUFFIXES))
        raise IngestError(f"{path} is none of the files that can be read: {known}, or a folder")


def _files_below(folder: Path, skipped: Skipped) -> Iterator[Path]:
    root = folder.resolve()

    def note(error: OSError) -> None:
        # A folder that cannot be read must not look empty: --sync would remove its points.
        path = Path(os.fsdecode(error.filename))
        name = encodable_name(path.relative_to(folder).as_posix())
        skipped.failed.append((name, f"{path} cannot be read: {error.strerror}"))

    for parent, folders, names in os.walk(folder, onerror=note):
        for name in folders:
            if name.startswith("."):
                skipped.unread["hidden"] += 1
            elif Path(parent, name).is_symlink():
                skipped.unread["links to folders"] += 1
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            reason = _skip_reason(file, root)
            if reason is None:
                yield file
            else:
                skipped.unread[reason] += 1


def _skip_reason(file: Path, root: Path) -> str | None:
    """Return why a file below `root` is not read: its suffix, or another reason; else None."""
    # Word creates a file ~$NAME beside each open document.
    if file.name.startswith((".", "~$")):
        return "hidden"
    suffix = file.suffix.lower()
    if suffix not in (*_READERS, *SUFFIXES):
        return encodable_name(suffix) or "without an ending"
    reason = None
    try:
        # Links may lead to any file of the machine.
        if not file.resolve(strict=True).is_relative_to(root):
            reason = "links out of the folder"
        # Opening a pipe would block.
        elif not file.is_file():
            reason = "no files"
        # Such as the settings of a program.
        elif suffix == ".json" and not _begins_array(file):
            reason = ".json without an array"
    except (OSError, RuntimeError):  # RuntimeError: links in a circle.
        reason = "links to nothing" if file.is_symlink() else None
    return reason


def _begins_array(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(1024).lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n").startswith(b"[")


def _detect_encoding(file: Path, fields: Fields) -> str:
    """Return the encoding of its mark, else UTF-8 if the file is valid, else that of `fields`."""
    with file.open("rb") as content:
        if content.read(2) in _UTF16_MARKS:
            return "utf-16"
        if fields.encoding is None:
            return _UTF8
        content.seek(0)
        decoder = codecs.getincrementaldecoder("utf-8")()
        for block in iter(partial(content.read, 2**20), b""):
            # UTF-16 without a mark and ISO-2022 may be valid UTF-8.
            if b"\0" in block or b"\x1b" in block:
                return fields.encoding
            try:
                decoder.decode(block)
            except UnicodeDecodeError:
                return fields.encoding
    return _UTF8


def _open_text(file: Path, fields: Fields) -> io.TextIOWrapper:
    return file.open(encoding=_detect_encoding(file, fields), newline="")


def _decoding_reason(error: UnicodeDecodeError, file: Path, fields: Fields) -> str:
    # Python names most encodings of 8 bits "charmap".
    encoding = str(fields.encoding if error.encoding == "charmap" else error.encoding)
    reason = f"is not {encoding.upper()}: {error.reason}"
    # HTML declares its encoding.
    hint = "" if file.suffix.lower() in _HTML else "; --encoding names another, such as cp1252"
    return reason + hint


def _split_parts(
    read: Callable[[int], str],
    source: str,
    key: str,
    metadata: Mapping[str, Any],
    size: int | None = None,
    *,
    is_markdown: bool = False,
) -> Iterator[Document]:
    """Yield a text as documents of at most PART_CHARACTERS, cut between paragraphs if possible.

    `size` is the size of the whole text in the input; None means that of its characters.
    """
    text, number = read(PART_CHARACTERS), 0
    while text:
        cut = len(text) if len(text) < PART_CHARACTERS else _find_cut(text)
        part, text = _make_encodable(text[:cut]), text[cut:]
        if part.strip():
            part_size = len(part.encode()) if size is None else size * (number == 0)
            name = f"{key}\n{number}" if number else key
            yield Document(source, name, part, metadata, part_size, is_markdown, number > 0)
            number += 1
        text += read(PART_CHARACTERS - len(text))


def _find_cut(text: str) -> int:
    """Return the position after the last paragraph, line or word in the second half of a text."""
    for separator in ("\n\n", "\n\r\n", "\n", " "):
        position = text.rfind(separator, len(text) // 2)
        if position >= 0:
            return position + len(separator)
    return len(text)


def _read_text(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    is_markdown = file.suffix.lower() in _MARKDOWN
    with _open_text(file, fields) as lines:
        yield from _split_parts(lines.read, source, "", {}, is_markdown=is_markdown)


def _read_office(file: Path, source: str, skipped: Skipped) -> Iterator[Document]:
    content = read_office(file)
    bytes_per_character = file.stat().st_size / sum(map(len, content.pages))
    is_part = False
    for number, page in enumerate(content.pages, 1):
        metadata: dict[str, Any] = {"title": content.title} if content.title else {}
        if file.suffix.lower() == ".pdf":
            # Browsers and PDF viewers open `file.pdf#page=3` at page 3.
            metadata |= {"page": number, ANCHOR: f"page={number}"}
        read = io.StringIO(page).read
        for part in _split_parts(read, source, str(number), metadata, is_markdown=True):
            size = int(len(part.text) * bytes_per_character)
            yield replace(part, size=size, is_part=is_part)
            is_part = True
    if empty := content.pages.count(""):
        skipped.unread["pages without text"] += empty


def _read_html(file: Path, source: str, _fields: Fields) -> Iterator[Document]:
    with file.open("rb") as lines:
        content = lines.read(MAX_ROW + 1)
    if len(content) > MAX_ROW:
        raise UnreadableError(f"has more than the {MAX_ROW} bytes that are read of HTML")
    title, sections = read_html(content)
    occurrences: Counter[tuple[Any, ...]] = Counter()
    for number, section in enumerate(sections):
        metadata: dict[str, Any] = {"title": title} if title else {}
        metadata |= {HEADINGS: list(section.headings)} if section.headings else {}
        metadata |= {ANCHOR: section.anchor} if section.anchor else {}
        # Sections with the same headings and anchor are numbered.
        identity = section.headings, section.anchor
        key = str(occurrences[identity] or "")
        occurrences[identity] += 1
        size, read = len(content) * (number == 0), io.StringIO(section.text).read
        for part in _split_parts(read, source, key, metadata, size, is_markdown=True):
            yield replace(part, is_part=part.is_part or number > 0)


def _read_jsonl(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    with _open_text(file, fields) as text:
        for number, line in enumerate(_read_lines(text), 1):
            if line.strip():
                row, size = _parse_json(line, f"line {number}"), len(line.encode(errors="replace"))
                yield from _read_row(row, size, fields, source, f"line {number}")


def _read_json(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    with _open_text(file, fields) as text:
        content = text.read(MAX_ARRAY + 1)
    if len(content) > MAX_ARRAY:
        raise UnreadableError(f"has more than {MAX_ARRAY} characters: JSONL may have any number")
    rows = _parse_json(content, "it")
    if not isinstance(rows, list):
        raise UnreadableError("is no array of JSON")
    size = file.stat().st_size // max(len(rows), 1)
    for number, row in enumerate(rows, 1):
        yield from _read_row(row, size, fields, source, f"element {number}")


def _parse_json(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"cannot be read: {location} is no JSON: {error}") from error


def _read_lines(text: io.TextIOWrapper) -> Iterator[str]:
    """Yield lines; a longer one than a row may be would fill the memory."""
    while line := text.readline(MAX_ROW + 1):
        if len(line) > MAX_ROW:
            raise UnreadableError(f"has a line of more than {MAX_ROW} characters")
        yield line


def _detect_delimiter(header: str, fields: Fields) -> str:
    """Return the delimiter with the text field as a column, else the one with most columns."""

    def rank(delimiter: str) -> tuple[bool, int]:
        columns = next(csv.reader([header], delimiter=delimiter), [])
        return fields.text in columns, len(columns)

    return max(_DELIMITERS, key=rank)


def _read_csv(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    csv.field_size_limit(MAX_ROW)
    with _open_text(file, fields) as text:
        header = text.readline(MAX_ROW)
        text.seek(0)
        is_tsv = file.suffix.lower() == ".tsv"
        delimiter = "\t" if is_tsv else _detect_delimiter(header, fields)
        # strict: else a quote that is never closed makes one field of the rest of the file.
        rows = csv.DictReader(_read_lines(text), delimiter=delimiter, strict=True)
        last_line = 0
        try:
            for row in rows:
                last_line = rows.line_num
                size = sum(len(str(value).encode(errors="replace")) for value in row.values())
                yield from _read_row(row, size, fields, source, f"line {last_line}")
        except csv.Error as error:
            location = f"the row that begins behind line {last_line}"
            raise UnreadableError(f"cannot be read: {location} is no CSV: {error}") from error


def _read_parquet(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - only needed for Parquet
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        raise UnreadableError("needs pyarrow: pip install pyarrow") from error
    try:
        with pq.ParquetFile(file) as table:
            size = file.stat().st_size // max(table.metadata.num_rows, 1)
            batches = table.iter_batches(batch_size=_PARQUET_ROWS)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield from _read_row(row, size, fields, source, f"row {number}")
    except (pa.ArrowInvalid, pa.ArrowMemoryError) as error:
        raise UnreadableError(f"is no Parquet: {error}") from error
    except OverflowError as error:
        raise UnreadableError(f"has a time beyond those of Python: {error}") from error


def _read_row(
    row: Any, size: int, fields: Fields, source: str, location: str
) -> Iterator[Document]:
    def unreadable(reason: str) -> UnreadableError:
        return UnreadableError(f"cannot be read: {location} {reason}")

    if not isinstance(row, dict):
        raise unreadable("is no JSON object")
    for name, option in ((fields.text, "--text-field"), (fields.id, "--id-field")):
        if name is not None and name not in row:
            names = ", ".join(map(str, row))
            raise unreadable(f"has no field {name}, only {names}: {option} names another")
    text = row[fields.text]
    if text is not None and not isinstance(text, str):
        raise unreadable(f"has {text!r:.80} in {fields.text}, which is no text")
    if text is None or not text.strip():
        return
    if fields.id is None:
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    else:
        key = _make_encodable(str(row[fields.id]))
    others = {str(name): row[name] for name in row if name not in (fields.text, None)}
    if _is_too_deep(others):
        raise unreadable(f"has fields in more than {_MAX_LEVELS} levels")
    read = io.StringIO(text, newline="").read
    yield from _split_parts(read, source, key, _to_payload(others), size)


def _make_encodable(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON may have but a request may not."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _to_payload(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values for a payload: dates become text, NaN and infinity null."""
    dumped = _make_encodable(json.dumps(row, default=str, ensure_ascii=False))
    loaded: dict[str, Any] = json.loads(dumped, parse_int=_parse_int, parse_constant=lambda _: None)
    return loaded


def _parse_int(digits: str) -> int | str:
    """Parse an integer of 64 bits, as gRPC has; a larger one remains text."""
    number = int(digits)
    return number if -(2**63) <= number < 2**63 else digits


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_LEVELS):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
        level = children
    return any(isinstance(item, dict | list) for item in level)


_Reader = Callable[[Path, str, Fields], Iterator[Document]]
_READERS: Mapping[str, _Reader] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    **dict.fromkeys(_HTML, _read_html),
    **dict.fromkeys((".txt", ".text", ".rst", *_MARKDOWN), _read_text),
}

"""Files and folders into documents: rows, texts, sections of HTML, and office documents."""

import codecs
import csv
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from smart_embedder_client.ingest.html import HtmlError, read_html
from smart_embedder_client.ingest.office import ENDINGS, OfficeError, read_office
from smart_embedder_client.qdrant.store import ANCHOR, ANCHORS, HEADINGS

_UTF8 = "utf-8-sig"
_MARKDOWN = (".md", ".markdown")
# A text beyond this becomes several documents, each of which is split, stored and noted by itself.
PART_CHARACTERS = 131_072
# Of a line of JSONL, a row of CSV, a file of HTML; of Parquet, of the rows that are read together.
LONGEST_ROW = 2**24
# Of an array of JSON, what is read at a time.
_BLOCK = 2**18
_BETWEEN = re.compile(r"[,\s]*")
_DELIMITERS = (",", ";", "\t")
_HTML = (".html", ".htm")
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PARQUET_ROWS, _PARQUET_BYTES = 256, 2**28
# Qdrant Edge stores 122, and cannot open a collection again that has more. A message of gRPC has at
# most 100, of which a level takes up to three.
_MOST_LEVELS = 20


class SourceError(Exception):
    """A source cannot be read; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Which fields of a row are read: `text`, and `id` if the rows have one.

    `encoding` is that of texts and rows that are not UTF-8.
    """

    text: str = "text"
    id: str | None = None
    encoding: str | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """One text before it is split.

    Attributes:
        source: Its file, as a path below the folder that is ingested.
        key: Tells the rows of a file apart: the value of the id field, else a digest of the text.
        text: What is embedded.
        metadata: The other fields of its row.
        size: How many bytes of the input it takes, for the progress bar.
        is_markdown: Whether it is split by its headings.
        is_part: Whether it goes on where the document before it ends, in a longer text or a page.
        anchors: Places in the text that a link can name, and their names, in order.
    """

    source: str
    key: str
    text: str
    metadata: Mapping[str, Any]
    size: int
    is_markdown: bool = False
    is_part: bool = False
    anchors: tuple[tuple[int, str], ...] = ()

    def metadata_of(self, chunks: Sequence[str]) -> list[Mapping[str, Any]]:
        """The metadata of each of its chunks: those of the document, and its anchors."""
        if not self.anchors:
            return [self.metadata] * len(chunks)
        start, found = -1, list[Mapping[str, Any]]()
        for chunk in chunks:
            # A chunk is a part of the text, and begins behind the beginning of the one before.
            start = max(self.text.find(chunk, start + 1), start)
            before = [name for place, name in self.anchors if place <= start]
            places = [(place - start, name) for place, name in self.anchors]
            within = [[place, name] for place, name in places if 0 < place < len(chunk)]
            metadata = {ANCHOR: before[-1]} if before else {}
            found.append({**self.metadata, **metadata, **({ANCHORS: within} if within else {})})
        return found


@dataclass(slots=True)
class Skipped:
    """What was not read.

    Attributes:
        unread: How many files have an ending that is not read, by that ending, and how many were
            left out for another reason, by that reason.
        failed: Files and folders that could not be read, or not to their end, and why.
    """

    unread: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, str]] = field(default_factory=list)


def encodable_name(name: str) -> str:
    """The name of a file, with escapes for its bytes that are not UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def input_bytes(path: Path) -> int:
    """The size of all files that `read_documents` reads; raises `SourceError` as it does."""
    total = 0
    for file in _files(path, Skipped()):
        with suppress(OSError):
            total += file.stat().st_size
    return total


def read_documents(path: Path, fields: Fields, skipped: Skipped) -> Iterator[Document]:
    """The documents of a file, or of all files below a folder, in a fixed order.

    Rows without text are left out. A file that cannot be read is noted in `skipped` with its
    reason, and the next one is read.

    Raises:
        SourceError: There is no such file, or it has another ending than those that are read.
    """
    root = path if path.is_dir() else path.parent
    for file in _files(path, skipped):
        source = encodable_name(file.relative_to(root).as_posix())
        name = encodable_name(str(file))
        try:
            if file.suffix.lower() in ENDINGS:
                yield from _read_office(file, source, skipped)
            else:
                yield from _READERS[file.suffix.lower()](file, source, fields)
        except SourceError as error:
            skipped.failed.append((source, str(error)))
        except UnicodeDecodeError as error:
            skipped.failed.append((source, f"{name} {_not_decoded(error, file, fields)}"))
        except OSError as error:
            skipped.failed.append((source, f"{name} cannot be read: {error.strerror or error}"))


def _files(path: Path, skipped: Skipped) -> Iterator[Path]:
    if path.is_dir():
        yield from _files_below(path, skipped)
    elif not path.exists():
        raise SourceError(f"{path} does not exist")
    elif path.suffix.lower() in (*_READERS, *ENDINGS):
        yield path
    else:
        known = ", ".join((*_READERS, *ENDINGS))
        raise SourceError(f"{path} is none of the files that can be read: {known}, or a folder")


def _files_below(folder: Path, skipped: Skipped) -> Iterator[Path]:
    root = folder.resolve()

    def note(error: OSError) -> None:
        # A folder that cannot be read must not look empty: --sync would remove its points.
        place = Path(os.fsdecode(error.filename))
        name = encodable_name(place.relative_to(folder).as_posix())
        skipped.failed.append((name, f"{place} cannot be read: {error.strerror}"))

    for parent, folders, names in os.walk(folder, onerror=note):
        for name in folders:
            if name.startswith("."):
                skipped.unread["hidden"] += 1
            elif Path(parent, name).is_symlink():
                skipped.unread["links to folders"] += 1
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            why_not = _why_not(file, root)
            if why_not is None:
                yield file
            else:
                skipped.unread[why_not] += 1


def _why_not(file: Path, root: Path) -> str | None:
    """Why a file below `root` is not read: its ending, or another reason; None if it is."""
    # Word leaves a file of the second name beside each document that is open.
    if file.name.startswith((".", "~$")):
        return "hidden"
    ending = file.suffix.lower()
    if ending not in (*_READERS, *ENDINGS):
        return encodable_name(ending) or "without an ending"
    why_not = None
    try:
        # Not a path through links, which may lead anywhere.
        if not file.resolve(strict=True).is_relative_to(root):
            why_not = "links out of the folder"
        # No pipe, which would be waited for.
        elif not file.is_file():
            why_not = "no files"
        # Settings of programs, for example.
        elif ending == ".json" and not _begins_array(file):
            why_not = ".json without an array"
    except (OSError, RuntimeError):  # RuntimeError is of links in a circle.
        why_not = "links to nothing" if file.is_symlink() else None
    return why_not


def _begins_array(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(1024).lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n").startswith(b"[")


def _encoding_of_file(file: Path, fields: Fields) -> str:
    """That of its mark; else UTF-8 if it is that; else the one that is told."""
    with file.open("rb") as content:
        if content.read(2) in _UTF16_MARKS:
            return "utf-16"
        if fields.encoding is None:
            return _UTF8
        content.seek(0)
        decoder = codecs.getincrementaldecoder("utf-8")()
        for block in iter(partial(content.read, 2**20), b""):
            # UTF-16 without a mark and ISO-2022 may look like UTF-8.
            if b"\0" in block or b"\x1b" in block:
                return fields.encoding
            try:
                decoder.decode(block)
            except UnicodeDecodeError:
                return fields.encoding
    return _UTF8


def _open_text(file: Path, fields: Fields) -> io.TextIOWrapper:
    return file.open(encoding=_encoding_of_file(file, fields), newline="")


def _not_decoded(error: UnicodeDecodeError, file: Path, fields: Fields) -> str:
    # Python calls most encodings of 8 bits "charmap".
    wrong = str(fields.encoding if error.encoding == "charmap" else error.encoding)
    told = f"is not {wrong.upper()}: {error.reason}"
    # HTML declares its encoding.
    hint = "" if file.suffix.lower() in _HTML else "; --encoding names another, such as cp1252"
    return told + hint


def _parts(
    read: Callable[[int], str],
    source: str,
    key: str,
    metadata: Mapping[str, Any],
    size: int | None = None,
    *,
    is_markdown: bool = False,
) -> Iterator[Document]:
    """A text as documents of at most PART_CHARACTERS, cut between paragraphs where it can be.

    `size` is that of the whole text in the input, if it is another than that of its characters.
    """
    text, number = read(PART_CHARACTERS), 0
    while text:
        cut = len(text) if len(text) < PART_CHARACTERS else _cut(text)
        part, text = _encodable(text[:cut]), text[cut:]
        if part.strip():
            bytes_of_part = len(part.encode()) if size is None else size * (number == 0)
            name = f"{key}\n{number}" if number else key
            yield Document(source, name, part, metadata, bytes_of_part, is_markdown, number > 0)
            number += 1
        text += read(PART_CHARACTERS - len(text))


def _cut(text: str) -> int:
    """The place after the last paragraph, line or word in its second half."""
    for mark in ("\n\n", "\n\r\n", "\n", " "):
        place = text.rfind(mark, len(text) // 2)
        if place >= 0:
            return place + len(mark)
    return len(text)


def _read_text(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    is_markdown = file.suffix.lower() in _MARKDOWN
    with _open_text(file, fields) as lines:
        yield from _parts(lines.read, source, "", {}, is_markdown=is_markdown)


def _read_office(file: Path, source: str, skipped: Skipped) -> Iterator[Document]:
    try:
        found = read_office(file)
    except OfficeError as error:
        raise SourceError(f"{file} {error}") from error
    bytes_per_character = file.stat().st_size / sum(map(len, found.pages))
    is_part = False
    for number, page in enumerate(found.pages, 1):
        metadata: dict[str, Any] = {"title": found.title} if found.title else {}
        if file.suffix.lower() == ".pdf":
            # The anchor as browsers and PDF viewers know it.
            metadata |= {"page": number, ANCHOR: f"page={number}"}
        read = io.StringIO(page).read
        for part in _parts(read, source, str(number), metadata, is_markdown=True):
            size = int(len(part.text) * bytes_per_character)
            yield replace(part, size=size, is_part=is_part)
            is_part = True
    if empty := found.pages.count(""):
        skipped.unread["pages without text"] += empty


def _read_html(file: Path, source: str, _fields: Fields) -> Iterator[Document]:
    with file.open("rb") as lines:
        content = lines.read(LONGEST_ROW + 1)
    if len(content) > LONGEST_ROW:
        raise SourceError(f"{file} has more than the {LONGEST_ROW} bytes that are read of HTML")
    try:
        title, sections = read_html(content)
    except HtmlError as error:
        raise SourceError(f"{file} cannot be read: {error}") from error
    same: Counter[tuple[Any, ...]] = Counter()
    for number, section in enumerate(sections):
        metadata: dict[str, Any] = {"title": title} if title else {}
        metadata |= {HEADINGS: list(section.headings)} if section.headings else {}
        place = section.headings, section.anchors[:1]
        # Sections under the same heading are told apart by their order.
        key = str(same[place] or "")
        same[place] += 1
        size, start = len(content) * (number == 0), 0
        read = io.StringIO(section.text).read
        for part in _parts(read, source, key, metadata, size, is_markdown=True):
            anchors = tuple((max(at - start, 0), name) for at, name in section.anchors)
            yield replace(part, anchors=anchors, is_part=part.is_part or number > 0)
            start += len(part.text)


def _read_jsonl(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    with _open_text(file, fields) as lines:
        number = 0
        while line := lines.readline(LONGEST_ROW + 1):
            number += 1
            place = f"{file}, line {number}"
            if len(line) > LONGEST_ROW:
                raise SourceError(f"{place} has more than {LONGEST_ROW} characters")
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise SourceError(f"{place} is no JSON: {error}") from error
                yield from _of_json(row, line, fields, source, place)


def _read_json(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    number = 0
    try:
        with _open_text(file, fields) as text:
            for row, written in _elements(text):
                number += 1
                yield from _of_json(row, written, fields, source, f"{file}, element {number}")
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        why = getattr(error, "msg", error)
        raise SourceError(f"{file} is no JSON behind element {number}: {why}") from error


def _elements(text: io.TextIOWrapper) -> Iterator[tuple[Any, str]]:
    """The elements of an array, as values and as they are written, without reading it whole."""
    decoder, rest, at = json.JSONDecoder(), text.read(_BLOCK).lstrip(), 1
    if not rest.startswith("["):
        raise json.JSONDecodeError("it is no array", rest, 0)
    while True:
        if between := _BETWEEN.match(rest, at):
            at = between.end()
        if rest[at : at + 1] == "]":
            break
        try:
            value, end = decoder.raw_decode(rest, at)
        except json.JSONDecodeError as error:
            # Where the text is cut, or where it is wrong.
            if len(rest) - at > LONGEST_ROW:
                error.msg += f", or it has more than {LONGEST_ROW} characters"
                raise
            more = text.read(max(len(rest) - at, _BLOCK))
            if not more:
                raise
            rest, at = rest[at:] + more, 0
        else:
            yield value, rest[at:end]
            at = end
    if rest[at + 1 :].strip() or text.read(_BLOCK).strip():
        raise json.JSONDecodeError("there is more than an array", rest, at)


def _of_json(row: Any, written: str, fields: Fields, source: str, place: str) -> Iterator[Document]:
    if not isinstance(row, dict):
        raise SourceError(f"{place} is no JSON object")
    size = len(written.encode(errors="replace"))
    yield from _of_row(row, size, fields, source, f"{place},")


class _RowLines:
    """The lines of a file of CSV; `left` is how many characters the next row may still have."""

    def __init__(self, lines: io.TextIOWrapper) -> None:
        self._lines = lines
        self.left = LONGEST_ROW

    def __iter__(self) -> "_RowLines":
        return self

    def __next__(self) -> str:
        line = self._lines.readline(self.left + 1)
        if not line:
            raise StopIteration
        self.left -= len(line)
        if self.left < 0:
            raise csv.Error(f"it has more than {LONGEST_ROW} characters")
        return line


def _delimiter(header: str, fields: Fields) -> str:
    """The one that makes a column of the field that is read; else the one that makes the most."""

    def rank(delimiter: str) -> tuple[bool, int]:
        names = next(csv.reader([header], delimiter=delimiter), [])
        return fields.text in names, len(names)

    return max(_DELIMITERS, key=rank)


def _read_csv(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    csv.field_size_limit(LONGEST_ROW)
    with _open_text(file, fields) as text:
        header = text.readline(_BLOCK)
        text.seek(0)
        is_tsv = file.suffix.lower() == ".tsv"
        delimiter = "\t" if is_tsv else _delimiter(header, fields)
        lines = _RowLines(text)
        # Otherwise a quote that is never closed makes one text of the rest of the file.
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
        last_line = 0
        try:
            last_line = rows.line_num if rows.fieldnames else 0
            for row in rows:
                size, lines.left = LONGEST_ROW - lines.left, LONGEST_ROW
                last_line = rows.line_num
                yield from _of_row(row, size, fields, source, f"{file}, line {last_line},")
        except csv.Error as error:
            row_of = f"{file}, the row that begins in line {last_line + 1}"
            raise SourceError(f"{row_of}, is no CSV: {error}") from error


def _read_parquet(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - Parquet alone needs it
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        raise SourceError("Parquet needs pyarrow: pip install pyarrow") from error
    try:
        with pq.ParquetFile(file) as table:
            groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
            mean = sum(each.total_byte_size for each in groups) // max(table.metadata.num_rows, 1)
            rows = min(max(_PARQUET_BYTES // max(mean, 1), 1), _PARQUET_ROWS)
            size = file.stat().st_size // max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(batch_size=rows):
                if batch.nbytes > _PARQUET_BYTES:
                    raise SourceError(f"{file} has {batch.nbytes} bytes in {len(batch)} rows")
                for row in batch.to_pylist():
                    yield from _of_row(row, size, fields, source, f"{file}")
    except (pa.ArrowInvalid, pa.ArrowMemoryError) as error:
        raise SourceError(f"{file} is no Parquet: {error}") from error
    except OverflowError as error:
        raise SourceError(f"{file} has a time beyond those of Python: {error}") from error


def _of_row(
    row: Mapping[Any, Any], size: int, fields: Fields, source: str, place: str
) -> Iterator[Document]:
    for name, option in ((fields.text, "--text-field"), (fields.id, "--id-field")):
        if name is not None and name not in row:
            names = ", ".join(map(str, row))
            raise SourceError(f"{place} has no field {name}, only {names}: {option} names another")
    text = row[fields.text]
    if text is not None and not isinstance(text, str):
        raise SourceError(f"{place} has {text!r:.80} in {fields.text}, which is no text")
    if text is None or not text.strip():
        return
    if fields.id is None:
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    else:
        key = _encodable(str(row[fields.id]))
    others = {str(name): row[name] for name in row if name not in (fields.text, None)}
    if _is_deep(others):
        raise SourceError(f"{place} has fields in more than {_MOST_LEVELS} levels")
    yield from _parts(io.StringIO(text, newline="").read, source, key, _as_json(others), size)


def _encodable(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may have and no request."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a payload can hold: dates as text, and no number that JSON does not have."""
    dumped = _encodable(json.dumps(row, default=str, ensure_ascii=False))
    loaded: dict[str, Any] = json.loads(dumped, parse_int=_number, parse_constant=lambda _: None)
    return loaded


def _number(digits: str) -> int | float | None:
    """An integer of 64 bits, which gRPC has; a larger one as a float, or None beyond floats."""
    number = int(digits)
    if number.bit_length() < 64:  # noqa: PLR2004 - and a sign
        return number
    with suppress(OverflowError):
        return float(number)
    return None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_LEVELS):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [v for each in nested for v in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)


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

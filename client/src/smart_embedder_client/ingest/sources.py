"""JSONL, CSV, Parquet, or a folder of text and Markdown, read without holding all of it."""

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from smart_embedder_client.ingest.documents import Document, Fields, SourceError

_MARKDOWN = (".md", ".markdown")
_TEXT = (".txt", ".text", ".rst", *_MARKDOWN)
_LONGEST_CSV_FIELD = 2**31 - 1
_PARQUET_ROWS = 256
# Qdrant Edge stores 122, and cannot open a collection again that has more. A message of gRPC has at
# most 100, of which a level takes up to three.
_MOST_LEVELS = 20


def encodable_name(name: str) -> str:
    """The name of a file, with escapes for its bytes that are not UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def input_bytes(path: Path) -> int:
    """The size of all files that `read_documents` reads.

    Raises:
        SourceError: A file or a folder cannot be read.
    """
    with _failures(path):
        return sum(file.stat().st_size for file in _files(path))


def read_documents(path: Path, fields: Fields) -> Iterator[Document]:
    """The documents of a file, or of all text and Markdown below a folder, in a fixed order.

    Rows without text are left out.

    Raises:
        SourceError: A file is not what its name says.
    """
    root = path if path.is_dir() else path.parent
    with _failures(path):
        for file in _files(path):
            source = encodable_name(file.relative_to(root).as_posix())
            read = _READERS.get(file.suffix.lower(), _read_text)
            with _failures(file):
                yield from read(file, source, fields)


@contextmanager
def _failures(path: Path) -> Iterator[None]:
    """Raise what reading raises as `SourceError`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8: {error}") from error
    except OSError as error:
        raise SourceError(f"{error.filename or path} cannot be read: {error}") from error


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise SourceError(f"{path} does not exist")
    if path.is_dir():
        yield from _texts_below(path)
    elif path.suffix.lower() in (*_READERS, *_TEXT):
        yield path
    else:
        known = ", ".join((*_READERS, *_TEXT))
        raise SourceError(f"{path} is none of the files that can be read: {known}, or a folder")


def _texts_below(folder: Path) -> Iterator[Path]:
    # A folder that cannot be read must not look empty: --sync would remove its points.
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            # No pipe, which would be waited for, and no link to what is gone.
            if name.lower().endswith(_TEXT) and not name.startswith(".") and file.is_file():
                yield file


def _raise(error: OSError) -> None:
    raise error


def _read_text(file: Path, source: str, _fields: Fields) -> Iterator[Document]:
    content = file.read_bytes()
    text = content.decode("utf-8-sig")
    if text.strip():
        is_markdown = file.suffix.lower() in _MARKDOWN
        yield Document(source, "", text, {}, len(content), is_markdown)


def _read_jsonl(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = _json_object(line, f"{file}, line {number}")
                yield from _of_row(row, len(line), fields, source, f"{file}, line {number},")


def _json_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{place} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise SourceError(f"{place} is no JSON object")
    return row


def _read_csv(file: Path, source: str, fields: Fields) -> Iterator[Document]:
    csv.field_size_limit(_LONGEST_CSV_FIELD)
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    with file.open("rb") as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as lines:
        # Otherwise a quote that is never closed makes one text of the rest of the file.
        rows = csv.DictReader(lines, delimiter=delimiter, strict=True)
        before = last_line = 0
        try:
            last_line = rows.line_num if rows.fieldnames else 0
            for row in rows:
                position = raw.tell()
                last_line = rows.line_num
                location = f"{file}, line {last_line},"
                yield from _of_row(row, position - before, fields, source, location)
                before = position
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
            size = file.stat().st_size // max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    yield from _of_row(row, size, fields, source, f"{file}")
    except pa.ArrowInvalid as error:
        raise SourceError(f"{file} is no Parquet: {error}") from error
    except OverflowError as error:
        raise SourceError(f"{file} has a time beyond those of Python: {error}") from error


def _of_row(
    row: Mapping[Any, Any], size: int, fields: Fields, source: str, place: str
) -> Iterator[Document]:
    _check_fields(row, fields, place)
    text = row[fields.text]
    if text is not None and not isinstance(text, str):
        raise SourceError(f"{place} has {text!r:.80} in {fields.text}, which is no text")
    if text is None or not text.strip():
        return
    key = _encodable(_digest(text) if fields.id is None else str(row[fields.id]))
    others = {str(name): row[name] for name in row if name not in (fields.text, None)}
    if _is_deep(others):
        raise SourceError(f"{place} has fields in more than {_MOST_LEVELS} levels")
    yield Document(source, key, _encodable(text), _as_json(others), size)


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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _check_fields(row: Mapping[Any, Any], fields: Fields, place: str) -> None:
    for name, option in ((fields.text, "--text-field"), (fields.id, "--id-field")):
        if name is not None and name not in row:
            names = ", ".join(map(str, row))
            raise SourceError(f"{place} has no field {name}, only {names}: {option} names another")


_Reader = Callable[[Path, str, Fields], Iterator[Document]]
_READERS: Mapping[str, _Reader] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}

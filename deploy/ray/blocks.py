"""Split input files into blocks, always in the same way, so that a job can be resumed.

A block is a range of bytes of a JSONL file, or a range of rows of a Parquet file. Listing the
blocks reads no rows, so the input may be of any size.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq

_JSONL = {".jsonl", ".ndjson"}
_PARQUET = {".parquet"}


class InputError(Exception):
    """The input or the output folder cannot be used; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row: its location in the input and its columns, or the error of an invalid line."""

    location: str
    values: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a file: lines that begin at the bytes `start` to `stop`, or rows of Parquet.

    The locations of its rows begin with `label`, the file's name in the input. `group` is the row
    group of a Parquet file, in which `start` and `stop` count rows; else None.
    """

    path: str
    label: str
    start: int
    stop: int
    group: int | None = None

    @property
    def name(self) -> str:
        """A digest that identifies the block."""
        return hashlib.sha256(orjson.dumps(asdict(self))).hexdigest()[:24]

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order."""
        return self._lines() if self.group is None else self._group_rows(self.group)

    def _lines(self) -> Iterator[Row]:
        with Path(self.path).open("rb") as file:
            if self.start:
                # A line belongs to the block in which it begins.
                file.seek(self.start - 1)
                file.readline()
            while (position := file.tell()) < self.stop and (line := file.readline()):
                if line.strip():
                    yield _parse_line(f"{self.label}:{position}", line)

    def _group_rows(self, group: int) -> Iterator[Row]:
        table = pq.ParquetFile(self.path).read_row_group(group)
        part = table.slice(self.start, self.stop - self.start)
        for number, values in enumerate(part.to_pylist(), self.start):
            yield Row(f"{self.label}:{group}:{number}", values)


@dataclass(frozen=True, slots=True)
class Input:
    """The input files by their labels, and the number of other files by suffix."""

    files: dict[str, Path]
    skipped: Counter[str]


def list_blocks(label: str, path: Path, max_rows: int, max_bytes: int) -> Iterator[Block]:
    """Yield the blocks of a file; raise `InputError` if it is neither JSONL nor Parquet."""
    if path.suffix in _JSONL:
        size = path.stat().st_size
        for start in range(0, size, max_bytes):
            yield Block(str(path), label, start, min(start + max_bytes, size))
    elif path.suffix in _PARQUET:
        metadata = pq.ParquetFile(path).metadata
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            for start in range(0, rows, max_rows):
                yield Block(str(path), label, start, min(start + max_rows, rows), group)
    else:
        raise InputError(f"{path} is neither JSONL (.jsonl, .ndjson) nor Parquet (.parquet)")


def find_input(paths: list[Path]) -> Input:
    """Find the given files, and all files below the given folders.

    The label of a file is its path from the given folder on. Names that begin with `.` or `_` are
    left out: Spark and Hive use them for files without data. Raises `InputError` if there is no
    file, a file is given twice, or two files have the same label, and so their rows the same ids.
    """
    labelled, skipped = [], Counter[str]()
    for path in paths:
        base = path.resolve()
        if path.is_dir():
            for file in sorted(base.rglob("*")):
                inner = file.relative_to(base)
                if not file.is_file() or any(part[0] in "._" for part in inner.parts):
                    continue
                if file.suffix in _JSONL | _PARQUET:
                    labelled.append((Path(base.name, inner).as_posix(), file))
                else:
                    skipped[file.suffix or "no ending"] += 1
        elif path.is_file():
            labelled.append((path.name, base))
        else:
            raise InputError(f"{path} does not exist")
    if not labelled:
        raise InputError("there is no JSONL or Parquet file in the input")
    _require_distinct(labelled)
    return Input(dict(labelled), skipped)


def _require_distinct(labelled: list[tuple[str, Path]]) -> None:
    paths: dict[str, Path] = {}
    seen: set[Path] = set()
    for label, path in labelled:
        if path in seen:
            raise InputError(f"{path} is named twice in the input")
        seen.add(path)
        if label in paths:
            raise InputError(
                f"the rows of {paths[label]} and {path} would have the same ids, which begin with "
                f"{label}: name a folder above both instead"
            )
        paths[label] = path


def _parse_line(location: str, line: bytes) -> Row:
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return Row(location, {}, f"the line is no JSON: {error}")
    if not isinstance(values, dict):
        return Row(location, {}, "the line is no JSON object")
    return Row(location, values)

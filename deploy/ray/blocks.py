"""Divides input files into blocks, always into the same ones, so that a job can be resumed.

A block is a range of bytes of a JSONL file, or a range of rows of a Parquet file. Listing the
blocks reads no rows, so the input may be of any size.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq

_JSONL = {".jsonl", ".ndjson"}
_PARQUET = {".parquet"}


class InputError(Exception):
    """The input cannot be read; the message says where, in one sentence."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its columns and its place in the file, or the error of a line that is no row."""

    place: str
    values: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The lines that begin at the bytes from `start` to `stop`, or the rows with these numbers.

    `group` is the row group of a Parquet file, within which rows are counted; else None.
    """

    path: str
    start: int
    stop: int
    group: int | None = None

    @property
    def name(self) -> str:
        """A digest that identifies the block."""
        return hashlib.sha256(orjson.dumps(asdict(self))).hexdigest()[:24]

    def rows(self) -> Iterator[Row]:
        """Its rows, in order."""
        return self._lines() if self.group is None else self._group_rows(self.group)

    def _lines(self) -> Iterator[Row]:
        name = Path(self.path).name
        with Path(self.path).open("rb") as file:
            if self.start:
                # A line belongs to the block in which it begins.
                file.seek(self.start - 1)
                file.readline()
            while (place := file.tell()) < self.stop and (line := file.readline()):
                if line.strip():
                    yield _row(f"{name}:{place}", line)

    def _group_rows(self, group: int) -> Iterator[Row]:
        name = Path(self.path).name
        table = pq.ParquetFile(self.path).read_row_group(group)
        part = table.slice(self.start, self.stop - self.start)
        for number, values in enumerate(part.to_pylist(), self.start):
            yield Row(f"{name}:{group}:{number}", values)


def list_blocks(path: Path, max_rows: int, max_bytes: int) -> Iterator[Block]:
    """The blocks of a file; raises `InputError` for one that is neither JSONL nor Parquet."""
    if path.suffix in _JSONL:
        size = path.stat().st_size
        for start in range(0, size, max_bytes):
            yield Block(str(path), start, min(start + max_bytes, size))
    elif path.suffix in _PARQUET:
        metadata = pq.ParquetFile(path).metadata
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            for start in range(0, rows, max_rows):
                yield Block(str(path), start, min(start + max_rows, rows), group)
    else:
        raise InputError(f"{path} is neither JSONL (.jsonl, .ndjson) nor Parquet (.parquet)")


def input_files(paths: list[Path]) -> list[Path]:
    """The files, and those in the folders; raises `InputError` if there are none."""
    files = []
    for path in paths:
        if path.is_dir():
            files += sorted(each for each in path.iterdir() if each.suffix in _JSONL | _PARQUET)
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path} does not exist")
    if not files:
        raise InputError("there is no JSONL or Parquet file in the input")
    return [path.resolve() for path in files]


def _row(place: str, line: bytes) -> Row:
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return Row(place, {}, f"the line is no JSON: {error}")
    if not isinstance(values, dict):
        return Row(place, {}, "the line is no JSON object")
    return Row(place, values)

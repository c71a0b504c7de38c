"""Divides input files into blocks, always into the same ones, so that a job can be resumed.

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
    """The input, or a folder of results, cannot be used; the message says why, in one sentence."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its columns and its place in the file, or the error of a line that is no row."""

    place: str
    values: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The lines that begin at the bytes from `start` to `stop`, or the rows with these numbers.

    The places of its rows begin with `label`, the file's name in the input. `group` is the row
    group of a Parquet file, within which rows are counted; else None.
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
        """Its rows, in order."""
        return self._lines() if self.group is None else self._group_rows(self.group)

    def _lines(self) -> Iterator[Row]:
        with Path(self.path).open("rb") as file:
            if self.start:
                # A line belongs to the block in which it begins.
                file.seek(self.start - 1)
                file.readline()
            while (place := file.tell()) < self.stop and (line := file.readline()):
                if line.strip():
                    yield _row(f"{self.label}:{place}", line)

    def _group_rows(self, group: int) -> Iterator[Row]:
        table = pq.ParquetFile(self.path).read_row_group(group)
        part = table.slice(self.start, self.stop - self.start)
        for number, values in enumerate(part.to_pylist(), self.start):
            yield Row(f"{self.label}:{group}:{number}", values)


@dataclass(frozen=True, slots=True)
class Input:
    """The files that are read: the path of each by its label; and how many are not, by ending."""

    files: dict[str, Path]
    not_read: Counter[str]


def list_blocks(label: str, path: Path, max_rows: int, max_bytes: int) -> Iterator[Block]:
    """The blocks of a file; raises `InputError` for one that is neither JSONL nor Parquet."""
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
    """The files, and those in the folders and below them, as Spark and Hive lay them out.

    A label is the file's name, after the folders from the one that was named on. Hidden files, and
    those whose names or folders begin with `_`, are no data there, and are left out. Raises
    `InputError` where there are none, one is named twice, or two have one label, so that their rows
    would share their ids.
    """
    labelled, not_read = [], Counter[str]()
    for path in paths:
        base = path.resolve()
        if path.is_dir():
            for each in sorted(base.rglob("*")):
                inner = each.relative_to(base)
                if not each.is_file() or any(part[0] in "._" for part in inner.parts):
                    continue
                if each.suffix in _JSONL | _PARQUET:
                    labelled.append((Path(base.name, inner).as_posix(), each))
                else:
                    not_read[each.suffix or "no ending"] += 1
        elif path.is_file():
            labelled.append((path.name, base))
        else:
            raise InputError(f"{path} does not exist")
    if not labelled:
        raise InputError("there is no JSONL or Parquet file in the input")
    _require_distinct(labelled)
    return Input(dict(labelled), not_read)


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


def _row(place: str, line: bytes) -> Row:
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return Row(place, {}, f"the line is no JSON: {error}")
    if not isinstance(values, dict):
        return Row(place, {}, "the line is no JSON object")
    return Row(place, values)

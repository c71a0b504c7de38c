"""The journal of stored documents, by digests of their content and of every option."""

import hashlib
import json
import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from smart_embedder_client.ingest.sources import Document

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "smart-embedder/ingest")
_DIGEST_BYTES = 16
_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents
    (digest BLOB PRIMARY KEY, points BLOB NOT NULL, run INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TEMPORARY TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID;
"""
_BYTES_PER_POINT = 16
_MAX_VARIABLES = 500


@dataclass(frozen=True, slots=True)
class Recipe:
    """The options that determine the points of a text.

    `vectors` has those of the vectors, such as the models' names, `splitting` those of the chunks.
    """

    dataset: str
    vectors: tuple[Any, ...]
    splitting: tuple[Any, ...]


def document_digest(document: Document, recipe: Recipe) -> bytes:
    """Return a digest of 16 bytes of the document and the options."""
    parts = (*_identity(document, recipe), recipe.splitting, document.text)
    return hashlib.blake2b(_encode(parts), digest_size=_DIGEST_BYTES).digest()


def chunk_ids(document: Document, chunks: Sequence[str], recipe: Recipe) -> list[str]:
    """Return a UUID for each chunk; a chunk that did not change in a document keeps its id."""
    occurrences: Counter[str] = Counter()
    common = hashlib.sha256(_encode(_identity(document, recipe))).hexdigest()
    ids = []
    for chunk in chunks:
        ids.append(str(uuid.uuid5(_NAMESPACE, f"{common} {occurrences[chunk]} {chunk}")))
        occurrences[chunk] += 1
    return ids


def _identity(document: Document, recipe: Recipe) -> tuple[Any, ...]:
    return (recipe.dataset, recipe.vectors, document.source, document.key, document.metadata)


def _encode(parts: tuple[Any, ...]) -> bytes:
    return json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()


class JournalError(Exception):
    """The journal cannot be used; the message is one sentence."""


class Journal:
    """The documents of a data set that this machine has stored in a collection.

    A document is noted after Qdrant has acknowledged all its points. If the process is killed
    between the two, the next run asks Qdrant which points exist. All methods raise `JournalError`,
    also if another process uses the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._failures():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=0, check_same_thread=False)
            try:
                self._open()
            except (sqlite3.Error, JournalError):
                self._connection.close()
                raise

    def _open(self) -> None:
        """Lock the file, create its tables, and begin a run."""
        # The lock is held until the process ends. A kill loses no committed transaction. A power
        # cut may, and then Qdrant is asked.
        self._connection.executescript(
            "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;"
            "PRAGMA temp_store=FILE;" + _SCHEMA
        )
        self._connection.execute("BEGIN EXCLUSIVE")
        self._connection.execute("COMMIT")
        self._run = 1 + self._number("SELECT coalesce(max(run), 0) FROM documents")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            reason = "another run has it open" if "locked" in str(error) else str(error)
            raise JournalError(f"the journal {self._path} cannot be used: {reason}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run the block in a transaction."""
        with self._failures(), self._connection:
            yield

    @property
    def points(self) -> int:
        """The number of points in the journal."""
        total = self._number("SELECT coalesce(sum(length(points)), 0) FROM documents")
        return total // _BYTES_PER_POINT

    def forget(self) -> None:
        """Forget all documents, because the collection has lost points."""
        with self._writing():
            self._connection.execute("DELETE FROM documents")

    def stored(self, digests: Sequence[bytes]) -> set[bytes]:
        """Return the documents that are completely stored, and mark their points as seen."""
        found: set[bytes] = set()
        with self._writing():
            for some in _slices(digests, _MAX_VARIABLES):
                rows = self._connection.execute(
                    f"SELECT digest, points FROM documents WHERE digest IN ({_marks(some)})",  # noqa: S608 - question marks
                    some,
                ).fetchall()
                found.update(digest for digest, _ in rows)
                self._mark_seen(
                    point for _, points in rows for point in _slices(points, _BYTES_PER_POINT)
                )
            self._connection.executemany(
                "UPDATE documents SET run = ? WHERE digest = ?",
                [(self._run, digest) for digest in found],
            )
        return found

    def add(self, digest: bytes, ids: Sequence[str]) -> None:
        """Note that a document is completely stored."""
        points = b"".join(UUID(id_).bytes for id_ in ids)
        with self._writing():
            self._connection.execute(
                "INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (digest, points, self._run)
            )

    def mark_seen(self, ids: Iterable[str]) -> None:
        """Note that the sources of this run have these points."""
        with self._writing():
            self._mark_seen(UUID(id_).bytes for id_ in ids)

    def see_first(self, digests: Sequence[bytes]) -> list[bool]:
        """Mark documents as seen, and return for each whether this run sees it first."""
        statement = "INSERT OR IGNORE INTO seen VALUES (?)"
        with self._writing():
            return [
                self._connection.execute(statement, (b"document" + digest,)).rowcount == 1
                for digest in digests
            ]

    def _mark_seen(self, points: Iterable[bytes]) -> None:
        self._connection.executemany(
            "INSERT OR IGNORE INTO seen VALUES (?)", ((point,) for point in points)
        )

    @property
    def seen_points(self) -> int:
        """The number of points that the sources of this run have."""
        return self._number(f"SELECT count(*) FROM seen WHERE length(id) = {_BYTES_PER_POINT}")  # noqa: S608

    def unseen(self, ids: Sequence[str]) -> list[str]:
        """Return the points that the sources of this run do not have."""
        by_bytes = {UUID(id_).bytes: id_ for id_ in ids}
        with self._failures():
            for some in _slices(list(by_bytes), _MAX_VARIABLES):
                query = f"SELECT id FROM seen WHERE id IN ({_marks(some)})"  # noqa: S608 - question marks
                for (point,) in self._connection.execute(query, some):
                    del by_bytes[point]
        return list(by_bytes.values())

    def forget_unseen(self) -> None:
        """Forget the documents that this run has not seen."""
        with self._writing():
            self._connection.execute("DELETE FROM documents WHERE run < ?", (self._run,))

    def read_fact(self, name: str) -> str | None:
        """Return a value that an earlier run has stored."""
        row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def store_fact(self, name: str, value: str) -> None:
        """Store a value for later runs."""
        with self._writing():
            self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def _number(self, query: str) -> int:
        with self._failures(), closing(self._connection.execute(query)) as rows:
            return int(rows.fetchone()[0])

    def close(self) -> None:
        """Release the file for other processes."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _slices(values: Any, size: int) -> Iterator[Any]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _marks(values: Sequence[bytes]) -> str:
    return ",".join("?" * len(values))

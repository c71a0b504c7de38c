"""The journal of stored documents, by digests of their content and of every option."""

import hashlib
import json
import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.sources import Document

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "smart-embedder/ingest")
_DIGEST_BYTES = 16
# The lock is held until the process ends. A kill loses no committed transaction. A power cut may,
# and then Qdrant is asked.
_SCHEMA = """
PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;
PRAGMA temp_store=FILE;
CREATE TABLE IF NOT EXISTS documents
    (digest BLOB PRIMARY KEY, points BLOB NOT NULL, run INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TEMPORARY TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID;
BEGIN EXCLUSIVE; COMMIT;
"""
_POINT_BYTES = 16


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


class Journal:
    """The documents of a data set that this machine has stored in a collection.

    A document is noted after Qdrant has acknowledged all its points. If the process is killed
    between the two, the next run asks Qdrant which points exist. All methods raise `IngestError`,
    also if another process uses the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._failures():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=0, check_same_thread=False)
        try:
            with self._failures():
                self._connection.executescript(_SCHEMA)
            self._run = 1 + self._number("SELECT coalesce(max(run), 0) FROM documents")
        except IngestError:
            self._connection.close()
            raise

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            reason = "another run has it open" if "locked" in str(error) else str(error)
            raise IngestError(f"the journal {self._path} cannot be used: {reason}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._failures(), self._connection:
            yield self._connection

    def _number(self, query: str, *values: Any) -> int:
        with self._failures():
            return int(self._connection.execute(query, values).fetchone()[0])

    @property
    def points(self) -> int:
        """The number of points in the journal."""
        total = self._number("SELECT coalesce(sum(length(points)), 0) FROM documents")
        return total // _POINT_BYTES

    def forget(self) -> None:
        """Forget all documents, because the collection has lost points."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM documents")

    def stored(self, digests: Iterable[bytes]) -> set[bytes]:
        """Return the documents that are completely stored, and mark their points as seen."""
        found = set()
        with self._transaction() as connection:
            for digest in digests:
                query = "UPDATE documents SET run = ? WHERE digest = ? RETURNING points"
                for (points,) in connection.execute(query, (self._run, digest)).fetchall():
                    found.add(digest)
                    starts = range(0, len(points), _POINT_BYTES)
                    self._mark_seen(points[start : start + _POINT_BYTES] for start in starts)
        return found

    def add(self, digest: bytes, ids: Sequence[str]) -> None:
        """Note that a document is completely stored."""
        row = (digest, b"".join(UUID(id_).bytes for id_ in ids), self._run)
        with self._transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", row)

    def see_first(self, digests: Sequence[bytes]) -> list[bool]:
        """Mark documents as seen, and return for each whether this run sees it first."""
        with self._transaction():
            return [self._mark_seen([b"document" + digest]) == 1 for digest in digests]

    def mark_seen(self, ids: Iterable[str]) -> None:
        """Note that the sources of this run have these points."""
        with self._transaction():
            self._mark_seen(UUID(id_).bytes for id_ in ids)

    def _mark_seen(self, keys: Iterable[bytes]) -> int:
        """Mark points or documents as seen, and return how many are new."""
        statement = "INSERT OR IGNORE INTO seen VALUES (?)"
        return self._connection.executemany(statement, ((key,) for key in keys)).rowcount

    @property
    def seen_points(self) -> int:
        """The number of points that the sources of this run have."""
        return self._number("SELECT count(*) FROM seen WHERE length(id) = ?", _POINT_BYTES)

    def unseen(self, ids: Iterable[str]) -> list[str]:
        """Return the points that the sources of this run do not have."""
        query = "SELECT count(*) FROM seen WHERE id = ?"
        return [id_ for id_ in ids if not self._number(query, UUID(id_).bytes)]

    def forget_unseen(self) -> None:
        """Forget the documents that this run has not seen."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM documents WHERE run < ?", (self._run,))

    def first_source(self, path: str) -> str:
        """Return the path of the source that was ingested first, which may be this one."""
        fact = "source path"
        with self._transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (fact, path))
            query = "SELECT value FROM facts WHERE name = ?"
            return str(connection.execute(query, (fact,)).fetchone()[0])

    def close(self) -> None:
        """Release the file for other processes."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

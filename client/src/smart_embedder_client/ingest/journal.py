"""Which documents are stored already, by names that change with them and with every option."""

import hashlib
import json
import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_MOST_VARIABLES = 500


@dataclass(frozen=True, slots=True)
class Recipe:
    """All options that decide what a text becomes.

    `vectors` are those of the vectors, such as the models' names; `splitting` those of the chunks.
    """

    dataset: str
    vectors: tuple[Any, ...]
    splitting: tuple[Any, ...]


def document_digest(document: Document, recipe: Recipe) -> bytes:
    """16 bytes that change with the document and with every option."""
    parts = (*_facts(document, document.metadata, recipe), recipe.splitting, document.text)
    # Most documents have no anchors, and keep the digests of earlier versions.
    parts += (document.anchors,) * bool(document.anchors)
    return hashlib.blake2b(_encode(parts), digest_size=_DIGEST_BYTES).digest()


def chunk_ids(document: Document, chunks: Sequence[str], recipe: Recipe) -> list[str]:
    """A UUID for each chunk; one that is unchanged in a changed document keeps it."""
    occurrences: Counter[str] = Counter()
    ids = []
    for chunk, metadata in zip(chunks, document.metadata_of(chunks), strict=True):
        common = hashlib.sha256(_encode(_facts(document, metadata, recipe))).hexdigest()
        ids.append(str(uuid.uuid5(_NAMESPACE, f"{common} {occurrences[chunk]} {chunk}")))
        occurrences[chunk] += 1
    return ids


def _facts(document: Document, metadata: Mapping[str, Any], recipe: Recipe) -> tuple[Any, ...]:
    return (recipe.dataset, recipe.vectors, document.source, document.key, metadata)


def _encode(parts: tuple[Any, ...]) -> bytes:
    return json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()


class JournalError(Exception):
    """The journal cannot be used; the message is one sentence."""


class Journal:
    """What one data set has in one collection, as far as this machine knows.

    A document is noted after Qdrant has acknowledged all its points. A kill in between loses no
    more than the note, and Qdrant itself is asked about documents without one. The methods raise
    `JournalError`, also if another process uses the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._failures():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=0, check_same_thread=False)
            # Until the process ends, however it ends. A kill loses nothing that was committed; a
            # power cut may, and Qdrant tells then.
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
            locked = "locked" in str(error)
            why = "another run has it open" if locked else str(error)
            raise JournalError(f"the journal {self._path} cannot be used: {why}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction."""
        with self._failures(), self._connection:
            yield

    @property
    def points(self) -> int:
        """How many points are noted."""
        total = self._number("SELECT coalesce(sum(length(points)), 0) FROM documents")
        return total // _BYTES_PER_POINT

    def forget(self) -> None:
        """Note nothing any more: the collection has lost points."""
        with self._writing():
            self._connection.execute("DELETE FROM documents")

    def stored(self, digests: Sequence[bytes]) -> set[bytes]:
        """Those of the documents that are stored whole; they count as seen in this run."""
        found: set[bytes] = set()
        with self._writing():
            for some in _slices(digests, _MOST_VARIABLES):
                rows = self._connection.execute(
                    f"SELECT digest, points FROM documents WHERE digest IN ({_marks(some)})",  # noqa: S608 - marks alone
                    some,
                ).fetchall()
                found.update(digest for digest, _ in rows)
                self._see(each for _, points in rows for each in _slices(points, _BYTES_PER_POINT))
            self._connection.executemany(
                "UPDATE documents SET run = ? WHERE digest = ?",
                [(self._run, digest) for digest in found],
            )
        return found

    def add(self, digest: bytes, ids: Sequence[str]) -> None:
        """Note that a document is stored whole."""
        points = b"".join(UUID(each).bytes for each in ids)
        with self._writing():
            self._connection.execute(
                "INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (digest, points, self._run)
            )

    def see(self, ids: Iterable[str]) -> None:
        """Note for the length of this run that its sources have these points."""
        with self._writing():
            self._see(UUID(each).bytes for each in ids)

    def see_first(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether this run has not seen each of the documents before."""
        statement = "INSERT OR IGNORE INTO seen VALUES (?)"
        with self._writing():
            return [
                self._connection.execute(statement, (b"document" + digest,)).rowcount == 1
                for digest in digests
            ]

    def _see(self, points: Iterable[bytes]) -> None:
        self._connection.executemany(
            "INSERT OR IGNORE INTO seen VALUES (?)", ((each,) for each in points)
        )

    @property
    def seen_points(self) -> int:
        """How many points this run's sources have."""
        return self._number(f"SELECT count(*) FROM seen WHERE length(id) = {_BYTES_PER_POINT}")  # noqa: S608

    def unseen(self, ids: Sequence[str]) -> list[str]:
        """Those of the points that this run's sources do not have."""
        by_bytes = {UUID(each).bytes: each for each in ids}
        with self._failures():
            for some in _slices(list(by_bytes), _MOST_VARIABLES):
                query = f"SELECT id FROM seen WHERE id IN ({_marks(some)})"  # noqa: S608 - marks alone
                for (each,) in self._connection.execute(query, some):
                    del by_bytes[each]
        return list(by_bytes.values())

    def forget_unseen(self) -> None:
        """Forget the documents that this run has not seen."""
        with self._writing():
            self._connection.execute("DELETE FROM documents WHERE run < ?", (self._run,))

    def fact(self, name: str) -> str | None:
        """A fact that an earlier run has noted."""
        row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def note(self, name: str, value: str) -> None:
        """Note a fact for later runs."""
        with self._writing():
            self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def _number(self, query: str) -> int:
        with self._failures(), closing(self._connection.execute(query)) as rows:
            return int(rows.fetchone()[0])

    def close(self) -> None:
        """Let another process use it."""
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

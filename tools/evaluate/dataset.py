"""A retrieval data set: documents, queries, and which documents answer which query.

Documents stay on the disk; only where they begin is kept.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Qrels = dict[str, dict[str, int]]
# What is embedded at once: the ColBERT vectors of so many characters are some 800 MB at most.
PIECE_CHARACTERS = 200_000
PIECE_DOCUMENTS = 256


class DatasetError(Exception):
    """The data set cannot be read; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document of the corpus; `text` is its title and its text."""

    id: str
    text: str


class Corpus(Protocol):
    """Documents by their index."""

    def __len__(self) -> int:
        """How many there are."""

    def read(self, indices: Iterable[int]) -> list[Document]:
        """The documents with these indices."""


@dataclass(frozen=True)
class Dataset:
    """`queries` are texts by id; `qrels` tells how relevant a document is, by query and document.

    Only queries with a relevant document are in it. `candidates` are the documents that a query may
    find, where a task of reranking names them; a document that `ignores_identical_ids` leaves out
    has the id of the query. `left_out` counts what of the files is not evaluated.
    """

    name: str
    corpus: Corpus
    queries: dict[str, str]
    qrels: Qrels
    candidates: Mapping[str, frozenset[str]] | None = None
    ignores_identical_ids: bool = False
    left_out: Mapping[str, int] = field(default_factory=dict)

    def may_find(self, documents: Sequence[Document]) -> npt.NDArray[np.bool_] | None:
        """`[queries, documents]`: which query may find which document; None where each may all."""
        if self.candidates is None and not self.ignores_identical_ids:
            return None
        indices = {document.id: index for index, document in enumerate(documents)}
        found = np.full((len(self.queries), len(documents)), self.candidates is None)
        for row, query in enumerate(self.queries):
            if self.candidates is not None:
                named = indices.keys() & self.candidates.get(query, frozenset())
                found[row, [indices[each] for each in named]] = True
            if self.ignores_identical_ids and query in indices:
                found[row, indices[query]] = False
        return found

    def pieces(self) -> Iterator[tuple[int, list[Document]]]:
        """All documents in pieces of bounded size, each with the index of its first document."""
        total = len(self.corpus)
        for begin in range(0, total, PIECE_DOCUMENTS):
            piece, characters = list[Document](), 0
            indices = range(begin, min(begin + PIECE_DOCUMENTS, total))
            for index, document in zip(indices, self.corpus.read(indices), strict=True):
                if piece and characters + len(document.text) > PIECE_CHARACTERS:
                    yield index - len(piece), piece
                    piece, characters = [], 0
                piece.append(document)
                characters += len(document.text)
            yield indices.stop - len(piece), piece


class JsonLinesCorpus:
    """BEIR's corpus.jsonl: `_id`, `title`, `text`. Every line is looked at once, at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts: list[int] = []
        self.ids: set[str] = set()
        place = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    id_ = _id(_parse(line, f"line {number} of {path}"), path)
                    if id_ in self.ids:
                        raise DatasetError(f"line {number} of {path} repeats the id {id_!r}")
                    self.ids.add(id_)
                    self._starts.append(place)
                place += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, indices: Iterable[int]) -> list[Document]:
        """The documents with these indices."""
        found = []
        with self._path.open("rb") as file:
            for index in indices:
                file.seek(self._starts[index])
                record = json.loads(file.readline())
                found.append(Document(_id(record, self._path), document_text(record)))
        return found


def document_text(record: dict[str, Any]) -> str:
    """What is embedded of a document: its title, if it has one, and its text, as BEIR does it."""
    return f"{record.get('title') or ''} {record.get('text') or ''}".strip()


def make_dataset(
    name: str,
    corpus: Corpus,
    queries: dict[str, str],
    qrels: Qrels,
    missing_documents: int = 0,
    **rules: Any,
) -> Dataset:
    """The data set of the queries that have a relevant document; `rules` are `Dataset`'s.

    `missing_documents` are judged ones that the corpus does not have. Raises `DatasetError` where
    no query is left.
    """
    judged = {
        query: grades
        for query, grades in qrels.items()
        if query in queries and max(grades.values(), default=0) > 0
    }
    if not judged or not len(corpus):
        raise DatasetError(f"{name} has no document, or no query with a relevant document")
    left_out = {
        "queries without a relevant document": len(queries) - len(judged),
        "judged queries that are not among the queries": len(qrels.keys() - queries.keys()),
        "judged documents that are not in the corpus": missing_documents,
    }
    told = {what: number for what, number in left_out.items() if number}
    texts = {query: queries[query] for query in judged}
    return Dataset(name, corpus, texts, judged, left_out=told, **rules)


def read_beir(folder: Path, split: str, **rules: Any) -> Dataset:
    """Read a folder of corpus.jsonl, queries.jsonl and qrels/*.tsv; `rules` are `Dataset`'s.

    Raises `DatasetError` where a file is missing or a line is not as it should be.
    """
    corpus, queries = folder / "corpus.jsonl", folder / "queries.jsonl"
    for file in (corpus, queries):
        if not file.is_file():
            raise DatasetError(f"{file} is missing: a data set has corpus.jsonl and queries.jsonl")
    texts: dict[str, str] = {}
    with queries.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                record = _parse(line, f"line {number} of {queries}")
                texts[_id(record, queries)] = _text(record, "text", queries)
    documents, qrels = JsonLinesCorpus(corpus), _read_qrels(folder / "qrels", split)
    missing = len(set[str]().union(*qrels.values()) - documents.ids)
    return make_dataset(folder.resolve().name, documents, texts, qrels, missing, **rules)


def _read_qrels(folder: Path, split: str) -> Qrels:
    """Columns query-id, corpus-id and score, with or without a line that names them.

    Of the split's file, or of the only one that there is.
    """
    path, files = folder / f"{split}.tsv", sorted(folder.glob("*.tsv"))
    if path not in files and len(files) != 1:
        there = ", ".join(file.stem for file in files) or "none"
        raise DatasetError(f"{path} is missing; splits that are there: {there}")
    path = path if path in files else files[0]
    qrels: Qrels = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        for number, row in enumerate(rows, 1):
            if not row or (number == 1 and row[0] == "query-id"):
                continue
            try:
                query, document, score = row
                qrels.setdefault(query, {})[document] = int(score)
            except ValueError:
                raise DatasetError(
                    f"line {number} of {path} has no query id, document id and whole number"
                ) from None
    return qrels


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DatasetError(f"{where} is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise DatasetError(f"{where} is no JSON object")
    return record


def _id(record: dict[str, Any], path: Path) -> str:
    """An id may be a number, which qrels write as text."""
    value = record.get("_id")
    return str(value) if isinstance(value, int) else _text(record, "_id", path)


def _text(record: dict[str, Any], field: str, path: Path) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        raise DatasetError(f"a record of {path} has no text in {field!r}")
    return value

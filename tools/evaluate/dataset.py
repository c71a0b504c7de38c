"""Retrieval data sets in BEIR's format: documents, queries, and judgements of relevance."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Qrels = dict[str, dict[str, int]]


class DatasetError(Exception):
    """The data set cannot be read; the message is one sentence."""


@dataclass(frozen=True)
class Dataset:
    """Texts by id, and the relevance of documents by query and document (`qrels`).

    Contains only queries with a relevant document. `left_out` counts the records that are not used.
    """

    name: str
    documents: dict[str, str]
    queries: dict[str, str]
    qrels: Qrels
    left_out: dict[str, int]


def read_beir(folder: Path, split: str) -> Dataset:
    """Read a folder of corpus.jsonl, queries.jsonl and qrels/*.tsv.

    A document is its title, if it has one, and its text, joined as by BEIR. Raises `DatasetError`
    for a missing file or an invalid line.
    """
    documents = {
        id_: f"{record.get('title') or ''} {record.get('text') or ''}".strip()
        for id_, record in _records(folder / "corpus.jsonl")
    }
    queries: dict[str, str] = {}
    for id_, record in _records(folder / "queries.jsonl"):
        if not isinstance(record.get("text"), str):
            raise DatasetError(f"the query {id_!r} of {folder} has no text in 'text'")
        queries[id_] = record["text"]
    qrels = _read_qrels(folder / "qrels", split)
    judged = {
        query: grades
        for query, grades in qrels.items()
        if query in queries and max(grades.values()) > 0
    }
    if not judged or not documents:
        raise DatasetError(f"{folder} has no document, or no query with a relevant document")
    graded = set[str]().union(*qrels.values())
    left_out = {
        "queries without a relevant document": len(queries) - len(judged),
        "judged queries that are not among the queries": len(qrels.keys() - queries.keys()),
        "judged documents that are not in the corpus": len(graded - documents.keys()),
    }
    texts = {query: queries[query] for query in judged}
    left_out = {reason: number for reason, number in left_out.items() if number}
    return Dataset(folder.resolve().name, documents, texts, judged, left_out)


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a JSON Lines file with their `_id`, which may be a number."""
    if not path.is_file():
        raise DatasetError(f"{path} is missing: a data set has corpus.jsonl and queries.jsonl")
    seen = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DatasetError(f"line {number} of {path} is not JSON: {error}") from None
            if not isinstance(record, dict) or not isinstance(record.get("_id"), str | int):
                raise DatasetError(f"line {number} of {path} is not a JSON object with an '_id'")
            id_ = str(record["_id"])
            if id_ in seen:
                raise DatasetError(f"line {number} of {path} repeats the id {id_!r}")
            seen.add(id_)
            yield id_, record


def _read_qrels(folder: Path, split: str) -> Qrels:
    """Read the columns query-id, corpus-id and score, with or without a header line.

    Reads the split's file, or the only file in the folder.
    """
    path, files = folder / f"{split}.tsv", sorted(folder.glob("*.tsv"))
    if path not in files and len(files) != 1:
        splits = ", ".join(file.stem for file in files) or "none"
        raise DatasetError(f"{path} is missing; existing splits: {splits}")
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

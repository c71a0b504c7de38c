"""The outputs of a job; each block is written completely or not at all."""

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from qdrant_client import QdrantClient, models

from smart_embedder.requests import Outputs
from smart_embedder.results import TextEmbedding

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "smart-embedder/ray")
_BATCH_POINTS = 128
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("metadata", pa.string()),
        ("dense", pa.list_(pa.float32())),
        ("sparse_indices", pa.list_(pa.int64())),
        ("sparse_values", pa.list_(pa.float32())),
        ("colbert", pa.list_(pa.list_(pa.float32()))),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class EmbeddedRow:
    """A row with its vectors or its error; `metadata` has its other columns."""

    id: str
    text: str | None
    metadata: dict[str, Any]
    vectors: TextEmbedding | None
    error: str | None = None


class Output(Protocol):
    """Stores blocks; writing a block again replaces it."""

    def is_done(self, block: str) -> bool:
        """Whether the block of this name was written completely."""

    def write(self, block: str, rows: Sequence[EmbeddedRow]) -> None:
        """Write a block; if the process is killed before the end, the block is not done."""


class ParquetOutput:
    """Writes a data set of Parquet: a folder with a file for each block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def is_done(self, block: str) -> bool:
        """Implement `Output`."""
        return self._file(block).exists()

    def write(self, block: str, rows: Sequence[EmbeddedRow]) -> None:
        """Implement `Output`."""
        table = pa.Table.from_pylist([_make_record(row) for row in rows], _SCHEMA)
        target = self._file(block)
        unfinished = unfinished_name(target)
        pq.write_table(table, unfinished, compression="zstd")
        _publish(unfinished, target)

    def _file(self, block: str) -> Path:
        return self._folder / f"block-{block}.parquet"


class QdrantOutput:
    """Stores points in a Qdrant collection, and a marker for each block in `folder`.

    The ids of points are made from those of the rows. Rows without vectors are left out.
    """

    def __init__(self, folder: Path, url: str, collection: str, api_key: str | None) -> None:
        self._folder = folder
        self._collection = collection
        self._client = QdrantClient(url=url, api_key=api_key, timeout=60)

    def create(self, outputs: Outputs, dense: int, colbert: int) -> None:
        """Create the collection, unless it exists."""
        if self._client.collection_exists(self._collection):
            return
        vectors = {}
        if outputs.dense:
            vectors["dense"] = models.VectorParams(size=dense, distance=models.Distance.COSINE)
        if outputs.colbert:
            vectors["colbert"] = models.VectorParams(
                size=colbert,
                distance=models.Distance.COSINE,
                multivector_config=models.MultiVectorConfig(
                    comparator=models.MultiVectorComparator.MAX_SIM
                ),
                hnsw_config=models.HnswConfigDiff(m=0),
            )
        sparse = {"sparse": models.SparseVectorParams()} if outputs.sparse else None
        self._client.create_collection(self._collection, vectors, sparse_vectors_config=sparse)

    def is_done(self, block: str) -> bool:
        """Implement `Output`."""
        return self._marker(block).exists()

    def write(self, block: str, rows: Sequence[EmbeddedRow]) -> None:
        """Implement `Output`."""
        points = [_make_point(row, row.vectors) for row in rows if row.vectors is not None]
        for start in range(0, len(points), _BATCH_POINTS):
            batch = points[start : start + _BATCH_POINTS]
            self._client.upsert(self._collection, batch, wait=True)
        unfinished = unfinished_name(self._marker(block))
        failed = [{"id": row.id, "error": row.error} for row in rows if row.vectors is None]
        unfinished.write_bytes(orjson.dumps({"points": len(points), "left_out": failed}))
        _publish(unfinished, self._marker(block))

    def _marker(self, block: str) -> Path:
        return self._folder / f"block-{block}.json"


def _make_record(row: EmbeddedRow) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": row.id,
        "text": row.text,
        "metadata": _to_json(row.metadata).decode(),
        "error": row.error,
    }
    vectors = row.vectors
    if vectors is not None:
        record["dense"] = vectors.dense
        record["colbert"] = None if vectors.colbert is None else list(vectors.colbert)
        if vectors.sparse is not None:
            record["sparse_indices"] = vectors.sparse.indices
            record["sparse_values"] = vectors.sparse.values
    return record


def _make_point(row: EmbeddedRow, vectors: TextEmbedding) -> models.PointStruct:
    named: dict[str, Any] = {}
    if vectors.dense is not None:
        named["dense"] = vectors.dense.tolist()
    if vectors.colbert is not None:
        named["colbert"] = vectors.colbert.tolist()
    if vectors.sparse is not None:
        named["sparse"] = models.SparseVector(
            indices=vectors.sparse.indices.tolist(), values=vectors.sparse.values.tolist()
        )
    payload = orjson.loads(_to_json(row.metadata)) | {"id": row.id, "text": row.text}
    return models.PointStruct(id=str(uuid.uuid5(_NAMESPACE, row.id)), vector=named, payload=payload)


def _to_json(values: dict[str, Any]) -> bytes:
    return orjson.dumps(values, default=str, option=orjson.OPT_NON_STR_KEYS)


def unfinished_name(target: Path) -> Path:
    """Return a hidden temporary name for a file, unique to this process."""
    return target.with_name(
        f".{target.name}.{os.getpid()}.{np.random.default_rng().integers(2**32)}"
    )


def _publish(unfinished: Path, target: Path) -> None:
    """Write a file's content to the disk, then give it its final name."""
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(target)

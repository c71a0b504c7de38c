"""Hybrid search with LanceDB: dense vectors and full text find passages, ColBERT sorts them.

pip install ./client lancedb pyarrow

LanceDB has no sparse vectors; its full-text index (BM25) is used instead. LANCEDB_URI is a folder
(lancedb-data by default) or the address of a bucket. SMART_EMBEDDER_URL is the address of
the service, SMART_EMBEDDER_TOKEN its access token if it has one.
"""

import os
import uuid
from collections.abc import Sequence

import lancedb
import pyarrow as pa
from lancedb.index import FTS
from lancedb.rerankers import RRFReranker
from lancedb.table import Table
from smart_embedder_client import Client

PASSAGES = [
    "Error E42: the pump is blocked. Clean the filter and start again.",
    "Error E43: the lid is open. Close it until it clicks.",
    "Descale the machine every month, or more often where the water is hard.",
    "The guarantee covers two years from the day of purchase.",
]
QUESTION = "The display shows E42, what should I do?"


def make_id(passage: str) -> str:
    """Derive the id from the text, so that a second run replaces passages and adds none."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, passage))


def store(database: lancedb.DBConnection, service: Client, passages: Sequence[str]) -> Table:
    """Create the table if there is none, and store the passages in it."""
    vectors = service.embed_documents(
        passages, return_sparse=False, return_colbert=True, output_dtype="float16"
    )
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("text", pa.string()),
            ("dense", pa.list_(pa.float16(), vectors.dense.shape[1])),
            ("colbert", pa.list_(pa.list_(pa.float16(), vectors.colbert[0].shape[1]))),
        ]
    )
    rows = pa.Table.from_pydict(
        {
            "id": [make_id(passage) for passage in passages],
            "text": list(passages),
            "dense": list(vectors.dense),
            "colbert": [list(tokens) for tokens in vectors.colbert],
        },
        schema,
    )
    table = database.create_table("manual", schema=schema, exist_ok=True)
    table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)
    table.create_index("text", config=FTS(), replace=True)
    return table


def search(table: Table, service: Client, question: str) -> list[dict]:
    """Fuse the best 100 by dense vectors and by words with RRF, and sort the best 20 by ColBERT."""
    vectors = service.embed_query(question, return_sparse=False, return_colbert=True)
    by_dense = (
        table.search(vectors.dense[0], vector_column_name="dense")
        .distance_type("cosine")
        .select(["id", "_distance"])
        .with_row_id(True)
        .limit(100)
    )
    by_words = (
        table.search(question, query_type="fts")
        .select(["id", "_score"])
        .with_row_id(True)
        .limit(100)
    )
    fused = RRFReranker().rerank_hybrid(question, by_dense.to_arrow(), by_words.to_arrow())
    best = ", ".join(f"'{id_}'" for id_ in fused["id"][:20].to_pylist())
    return (
        table.search(vectors.colbert[0], vector_column_name="colbert")
        .distance_type("cosine")
        .where(f"id IN ({best})", prefilter=True)
        .select(["text", "_distance"])
        .limit(10)
        .to_list()
    )


if __name__ == "__main__":
    database = lancedb.connect(os.environ.get("LANCEDB_URI", "lancedb-data"))
    with Client() as service:
        table = store(database, service, PASSAGES)
        for row in search(table, service, QUESTION):
            print(f"{row['_distance']:.3f}  {row['text']}")

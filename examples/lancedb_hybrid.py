"""Hybrid search with LanceDB: dense vectors and full text find, ColBERT vectors rank.

pip install ./client lancedb pyarrow

LanceDB has no sparse vectors; its full-text index (BM25) takes their place. LANCEDB_URI is a folder
(lancedb-data by default) or the address of a bucket. SMART_EMBEDDER_URL and SMART_EMBEDDER_TOKEN
say where the service is, and its token if it asks for one.
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


def id_of(passage: str) -> str:
    """It follows from the text, so what is stored already is replaced, and not stored again."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, passage))


def store(database: lancedb.DBConnection, service: Client, passages: Sequence[str]) -> Table:
    """Make the table where there is none, and put the passages into it."""
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
            "id": [id_of(passage) for passage in passages],
            "text": list(passages),
            "dense": list(vectors.dense),
            "colbert": [list(each) for each in vectors.colbert],
        },
        schema,
    )
    table = database.create_table("manual", schema=schema, exist_ok=True)
    table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)
    table.create_index("text", config=FTS(), replace=True)
    return table


def search(table: Table, service: Client, question: str) -> list[dict]:
    """The best 100 by dense vectors and by words, fused by RRF; the best 20 ranked by ColBERT."""
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

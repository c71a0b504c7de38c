"""Hybrid search with Milvus: dense and sparse vectors find passages, the reranker sorts them.

pip install ./client pymilvus milvus-lite

MILVUS_URI is the address of a server, or a file for Milvus Lite (milvus-data.db by default).
SMART_EMBEDDER_URL is the address of the service, SMART_EMBEDDER_TOKEN its access token if it has
one.
"""

import os
import uuid
from collections.abc import Sequence
from contextlib import closing

from pymilvus import AnnSearchRequest, DataType, MilvusClient, RRFRanker
from smart_embedder_client import Client

PASSAGES = [
    "Error E42: the pump is blocked. Clean the filter and start again.",
    "Error E43: the lid is open. Close it until it clicks.",
    "Descale the machine every month, or more often where the water is hard.",
    "The guarantee covers two years from the day of purchase.",
]
QUESTION = "The display shows E42, what should I do?"
COLLECTION = "manual"


def make_id(passage: str) -> str:
    """Derive the id from the text, so that a second run replaces passages and adds none."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, passage))


def create_collection(milvus: MilvusClient, width: int) -> None:
    """Create a collection with a row for each passage."""
    schema = MilvusClient.create_schema()
    schema.add_field("id", DataType.VARCHAR, max_length=36, is_primary=True)
    schema.add_field("text", DataType.VARCHAR, max_length=65535)
    schema.add_field("dense", DataType.FLOAT_VECTOR, dim=width)
    schema.add_field("sparse", DataType.SPARSE_FLOAT_VECTOR)
    index = MilvusClient.prepare_index_params()
    index.add_index("dense", index_type="AUTOINDEX", metric_type="COSINE")
    # Inner product, not BM25: bge-m3's weights already say how much each word counts.
    index.add_index("sparse", index_type="SPARSE_INVERTED_INDEX", metric_type="IP")
    milvus.create_collection(COLLECTION, schema=schema, index_params=index)


def embed(service: Client, texts: Sequence[str]) -> list[dict]:
    """Return the vector fields of a row for each text."""
    vectors = service.embed(texts)
    return [
        {"dense": dense, "sparse": sparse.as_dict()}
        for dense, sparse in zip(vectors.dense, vectors.sparse)
    ]


def store(milvus: MilvusClient, service: Client, passages: Sequence[str]) -> None:
    """Create the collection if there is none, and store the passages in it."""
    vectors = embed(service, passages)
    if not milvus.has_collection(COLLECTION):
        create_collection(milvus, len(vectors[0]["dense"]))
    rows = [{"id": make_id(text), "text": text} | fields for text, fields in zip(passages, vectors)]
    milvus.upsert(COLLECTION, rows)


def search(milvus: MilvusClient, service: Client, question: str) -> list[str]:
    """Fuse the best 100 by each kind of vector with RRF, and return the best 20."""
    (vectors,) = embed(service, [question])
    milvus.load_collection(COLLECTION)
    requests = [
        AnnSearchRequest([vectors["dense"]], "dense", {"metric_type": "COSINE"}, limit=100),
        AnnSearchRequest([vectors["sparse"]], "sparse", {"metric_type": "IP"}, limit=100),
    ]
    (hits,) = milvus.hybrid_search(
        COLLECTION, requests, RRFRanker(60), limit=20, output_fields=["text"]
    )
    return [hit["entity"]["text"] for hit in hits]


if __name__ == "__main__":
    uri = os.environ.get("MILVUS_URI", "milvus-data.db")
    with closing(MilvusClient(uri)) as milvus, Client() as service:
        store(milvus, service, PASSAGES)
        ranking = service.rerank(QUESTION, search(milvus, service, QUESTION))
        for score, text in zip(ranking.scores, ranking.passages):
            print(f"{score:.3f}  {text}")

"""Hybrid search with Qdrant: dense and sparse vectors find passages, ColBERT sorts them.

pip install ./client qdrant-client

QDRANT_URL is the address of a server, or ":memory:"; without it, files in the folder qdrant-data
are used. SMART_EMBEDDER_URL is the address of the service, SMART_EMBEDDER_TOKEN its access token if
it has one.
"""

import os
import uuid
from contextlib import closing

from qdrant_client import QdrantClient, models
from smart_embedder_client import Client, SparseVector

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


def connect() -> QdrantClient:
    """Connect to the server in the environment, or open files in a folder."""
    if "QDRANT_URL" in os.environ:
        return QdrantClient(os.environ["QDRANT_URL"], api_key=os.environ.get("QDRANT_API_KEY"))
    return QdrantClient(path="qdrant-data")


def create_collection(qdrant: QdrantClient, dense_width: int, colbert_width: int) -> None:
    """Create a collection with dense, sparse and ColBERT vectors."""
    qdrant.create_collection(
        COLLECTION,
        vectors_config={
            "dense": models.VectorParams(size=dense_width, distance=models.Distance.COSINE),
            # No index: ColBERT vectors only sort what the others find.
            "colbert": models.VectorParams(
                size=colbert_width,
                distance=models.Distance.COSINE,
                multivector_config=models.MultiVectorConfig(
                    comparator=models.MultiVectorComparator.MAX_SIM
                ),
                hnsw_config=models.HnswConfigDiff(m=0),
            ),
        },
        # No IDF: bge-m3's weights already say how much each word counts.
        sparse_vectors_config={"sparse": models.SparseVectorParams()},
    )


def store(qdrant: QdrantClient, service: Client, passages: list[str]) -> None:
    """Store each passage with its vectors of all three kinds."""
    vectors = service.embed_documents(passages, return_colbert=True)
    if not qdrant.collection_exists(COLLECTION):
        create_collection(qdrant, vectors.dense.shape[1], vectors.colbert[0].shape[1])
    qdrant.upsert(
        COLLECTION,
        [
            models.PointStruct(
                id=make_id(passage),
                vector={
                    "dense": dense.tolist(),
                    "sparse": to_qdrant(sparse),
                    "colbert": colbert.tolist(),
                },
                payload={"text": passage},
            )
            for passage, dense, sparse, colbert in zip(
                passages, vectors.dense, vectors.sparse, vectors.colbert, strict=True
            )
        ],
    )


def search(qdrant: QdrantClient, service: Client, question: str) -> list[models.ScoredPoint]:
    """Fuse the best 100 by dense and by sparse vectors, and sort the best 20 by ColBERT.

    RRF gives a passage 3 / rank by dense vectors, and 1 / rank by sparse ones.
    """
    vectors = service.embed_query(question, return_colbert=True)
    found = [
        models.Prefetch(query=vectors.dense[0].tolist(), using="dense", limit=100),
        models.Prefetch(query=to_qdrant(vectors.sparse[0]), using="sparse", limit=100),
    ]
    rrf = models.RrfQuery(rrf=models.Rrf(k=1, weights=[3, 1]))
    fused = models.Prefetch(prefetch=found, query=rrf, limit=20)
    return qdrant.query_points(
        COLLECTION, prefetch=fused, query=vectors.colbert[0].tolist(), using="colbert", limit=10
    ).points


def to_qdrant(sparse: SparseVector) -> models.SparseVector:
    """Convert token ids and weights for Qdrant."""
    return models.SparseVector(indices=sparse.indices.tolist(), values=sparse.values.tolist())


if __name__ == "__main__":
    with closing(connect()) as qdrant, Client() as service:
        store(qdrant, service, PASSAGES)
        for hit in search(qdrant, service, QUESTION):
            print(f"{hit.score:.3f}  {hit.payload['text']}")

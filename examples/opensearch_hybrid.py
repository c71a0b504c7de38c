"""Hybrid search with OpenSearch: dense and sparse vectors find, the reranker ranks.

NOT RUN against an OpenSearch: none could be had where the other examples are tested.

pip install ./client opensearch-py

OPENSEARCH_URL is the address of OpenSearch 2.11 or newer (http://127.0.0.1:9200 by default).
SMART_EMBEDDER_URL and SMART_EMBEDDER_TOKEN say where the service is, and its token if it asks for
one.
"""

import os
import uuid
from collections import defaultdict

from opensearchpy import OpenSearch, helpers
from smart_embedder_client import Client, SparseVector

PASSAGES = [
    "Error E42: the pump is blocked. Clean the filter and start again.",
    "Error E43: the lid is open. Close it until it clicks.",
    "Descale the machine every month, or more often where the water is hard.",
    "The guarantee covers two years from the day of purchase.",
]
QUESTION = "The display shows E42, what should I do?"
INDEX = "manual"


def mappings(width: int) -> dict:
    """A field for each kind of vectors; bge-m3 has learned how much each word counts."""
    method = {"name": "hnsw", "engine": "lucene", "space_type": "cosinesimil"}
    return {
        "properties": {
            "text": {"type": "text"},
            "dense": {"type": "knn_vector", "dimension": width, "method": method},
            "sparse": {"type": "rank_features"},
        }
    }


def weights_of(sparse: SparseVector) -> dict[str, float]:
    """A weight for each token id."""
    return {str(token): weight for token, weight in sparse.as_dict().items()}


def store(opensearch: OpenSearch, service: Client, passages: list[str]) -> None:
    """Make the index where there is none, and put the passages into it."""
    vectors = service.embed_documents(passages)
    if not opensearch.indices.exists(index=INDEX):
        body = {"settings": {"index.knn": True}, "mappings": mappings(vectors.dense.shape[1])}
        opensearch.indices.create(index=INDEX, body=body)
    actions = [
        {
            "_index": INDEX,
            "_id": str(uuid.uuid5(uuid.NAMESPACE_OID, text)),
            "_source": {"text": text, "dense": dense.tolist(), "sparse": weights_of(sparse)},
        }
        for text, dense, sparse in zip(passages, vectors.dense, vectors.sparse)
    ]
    helpers.bulk(opensearch, actions, refresh=True)


def search(opensearch: OpenSearch, service: Client, question: str) -> list[str]:
    """The best 100 by each kind of vector, fused by reciprocal rank; the best 20 of them."""
    vectors = service.embed_query(question)
    queries = [
        {"knn": {"dense": {"vector": vectors.dense[0].tolist(), "k": 100}}},
        {"neural_sparse": {"sparse": {"query_tokens": weights_of(vectors.sparse[0])}}},
    ]
    scores: dict[str, float] = defaultdict(float)
    for query in queries:
        body = {"size": 100, "_source": ["text"], "query": query}
        hits = opensearch.search(index=INDEX, body=body)["hits"]["hits"]
        for rank, hit in enumerate(hits, start=1):
            scores[hit["_source"]["text"]] += 1 / (60 + rank)
    return sorted(scores, key=scores.__getitem__, reverse=True)[:20]


if __name__ == "__main__":
    opensearch = OpenSearch(os.environ.get("OPENSEARCH_URL", "http://127.0.0.1:9200"))
    with Client() as service:
        store(opensearch, service, PASSAGES)
        ranking = service.rerank(QUESTION, search(opensearch, service, QUESTION))
        for score, text in zip(ranking.scores, ranking.passages):
            print(f"{score:.3f}  {text}")

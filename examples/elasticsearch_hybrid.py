"""Hybrid search with Elasticsearch: dense and sparse vectors find, the reranker ranks.

NOT RUN against an Elasticsearch: none could be had where the other examples are tested.

pip install ./client elasticsearch

ELASTICSEARCH_URL is the address of Elasticsearch 8.15 or newer (http://127.0.0.1:9200 by default),
and ELASTICSEARCH_API_KEY its key if it asks for one. SMART_EMBEDDER_URL and SMART_EMBEDDER_TOKEN
say where the service is, and its token if it asks for one.
"""

import os
import uuid
from collections import defaultdict

from elasticsearch import Elasticsearch, helpers
from smart_embedder_client import Client, SparseVector

PASSAGES = [
    "Error E42: the pump is blocked. Clean the filter and start again.",
    "Error E43: the lid is open. Close it until it clicks.",
    "Descale the machine every month, or more often where the water is hard.",
    "The guarantee covers two years from the day of purchase.",
]
QUESTION = "The display shows E42, what should I do?"
INDEX = "manual"
FIELDS = {
    "text": {"type": "text"},
    "dense": {"type": "dense_vector", "similarity": "cosine"},
    "sparse": {"type": "sparse_vector"},
}


def weights_of(sparse: SparseVector) -> dict[str, float]:
    """A weight for each token id."""
    return {str(token): weight for token, weight in sparse.as_dict().items()}


def store(elastic: Elasticsearch, service: Client, passages: list[str]) -> None:
    """Make the index where there is none, and put the passages into it."""
    if not elastic.indices.exists(index=INDEX):
        elastic.indices.create(index=INDEX, mappings={"properties": FIELDS})
    vectors = service.embed_documents(passages)
    actions = [
        {
            "_index": INDEX,
            "_id": str(uuid.uuid5(uuid.NAMESPACE_OID, text)),
            "_source": {"text": text, "dense": dense.tolist(), "sparse": weights_of(sparse)},
        }
        for text, dense, sparse in zip(passages, vectors.dense, vectors.sparse)
    ]
    helpers.bulk(elastic, actions, refresh=True)


def search(elastic: Elasticsearch, service: Client, question: str) -> list[str]:
    """The best 100 by each kind of vector, fused by reciprocal rank; the best 20 of them."""
    vectors = service.embed_query(question)
    dense, sparse = vectors.dense[0].tolist(), weights_of(vectors.sparse[0])
    queries = [
        {"knn": {"field": "dense", "query_vector": dense, "k": 100, "num_candidates": 200}},
        # The model has learned which words count: none is left out.
        {"sparse_vector": {"field": "sparse", "query_vector": sparse, "prune": False}},
    ]
    scores: dict[str, float] = defaultdict(float)
    for query in queries:
        answer = elastic.search(index=INDEX, query=query, size=100, source=["text"])
        for rank, hit in enumerate(answer["hits"]["hits"], start=1):
            scores[hit["_source"]["text"]] += 1 / (60 + rank)
    return sorted(scores, key=scores.__getitem__, reverse=True)[:20]


if __name__ == "__main__":
    url = os.environ.get("ELASTICSEARCH_URL", "http://127.0.0.1:9200")
    with (
        Client() as service,
        Elasticsearch(url, api_key=os.environ.get("ELASTICSEARCH_API_KEY")) as elastic,
    ):
        store(elastic, service, PASSAGES)
        ranking = service.rerank(QUESTION, search(elastic, service, QUESTION))
        for score, text in zip(ranking.scores, ranking.passages):
            print(f"{score:.3f}  {text}")

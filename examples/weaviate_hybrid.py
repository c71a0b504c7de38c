"""Hybrid search with Weaviate: dense vectors and words find, the reranker ranks.

NOT RUN against a Weaviate: none could be had where the other examples are tested.

pip install ./client weaviate-client

Weaviate has no sparse vectors: BM25 finds the words. WEAVIATE_HOST is the name of a server
(127.0.0.1 by default), whose ports are 8080 and 50051. SMART_EMBEDDER_URL and SMART_EMBEDDER_TOKEN
say where the service is, and its token if it asks for one.
"""

import os

import weaviate
from smart_embedder_client import Client
from weaviate.classes.config import Configure, DataType, Property
from weaviate.classes.data import DataObject
from weaviate.classes.query import HybridFusion
from weaviate.collections import Collection
from weaviate.util import generate_uuid5

PASSAGES = [
    "Error E42: the pump is blocked. Clean the filter and start again.",
    "Error E43: the lid is open. Close it until it clicks.",
    "Descale the machine every month, or more often where the water is hard.",
    "The guarantee covers two years from the day of purchase.",
]
QUESTION = "The display shows E42, what should I do?"
NAME = "Manual"


def store(database: weaviate.WeaviateClient, service: Client, passages: list[str]) -> Collection:
    """Make the collection where there is none, and put the passages into it."""
    if not database.collections.exists(NAME):
        database.collections.create(
            NAME,
            properties=[Property(name="text", data_type=DataType.TEXT)],
            vector_config=Configure.Vectors.self_provided(),
        )
    collection = database.collections.use(NAME)
    vectors = service.embed_documents(passages, return_sparse=False)
    # The id follows from the text, so what is stored already is replaced, and not stored again.
    objects = [
        DataObject({"text": text}, uuid=generate_uuid5(text), vector=dense.tolist())
        for text, dense in zip(passages, vectors.dense)
    ]
    stored = collection.data.insert_many(objects)
    if stored.has_errors:
        raise SystemExit(f"Weaviate refused some passages: {stored.errors}")
    return collection


def search(collection: Collection, service: Client, question: str) -> list[str]:
    """The best 20 by dense vectors and by words, fused by reciprocal rank."""
    dense = service.embed_query(question, return_sparse=False).dense[0].tolist()
    found = collection.query.hybrid(
        question, vector=dense, alpha=0.5, fusion_type=HybridFusion.RANKED, limit=20
    )
    return [str(each.properties["text"]) for each in found.objects]


if __name__ == "__main__":
    host = os.environ.get("WEAVIATE_HOST", "127.0.0.1")
    with Client() as service, weaviate.connect_to_local(host) as database:
        collection = store(database, service, PASSAGES)
        ranking = service.rerank(QUESTION, search(collection, service, QUESTION))
        for score, text in zip(ranking.scores, ranking.passages):
            print(f"{score:.3f}  {text}")

"""Search with Chroma: dense vectors and exact words find passages, the reranker sorts them.

pip install ./client chromadb

Only Chroma's cloud has an index of sparse vectors, so words of the question with a digit, such as
E42, are searched in the text. CHROMA_HOST is the name of a server, CHROMA_PORT its port (8000 by
default). Without it, files in the folder chroma-data are used.
SMART_EMBEDDER_URL is the address of the service, SMART_EMBEDDER_TOKEN its access token if it has
one.
"""

import os
import re
import uuid

import chromadb
from chromadb.api import ClientAPI
from chromadb.config import Settings
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


def connect() -> ClientAPI:
    """Connect to the server in the environment, or open files in a folder."""
    settings = Settings(anonymized_telemetry=False)
    if "CHROMA_HOST" in os.environ:
        port = int(os.environ.get("CHROMA_PORT", "8000"))
        return chromadb.HttpClient(os.environ["CHROMA_HOST"], port, settings=settings)
    return chromadb.PersistentClient("chroma-data", settings=settings)


def store(chroma: ClientAPI, service: Client, passages: list[str]) -> chromadb.Collection:
    """Create the collection if there is none, and store the passages in it."""
    collection = chroma.get_or_create_collection(
        "manual", embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
    )
    vectors = service.embed_documents(passages, return_sparse=False)
    ids = [make_id(passage) for passage in passages]
    collection.upsert(ids, vectors.dense, documents=passages)
    return collection


def search(collection: chromadb.Collection, service: Client, question: str) -> list[str]:
    """Return passages with a word that has a digit, then the best 20 by dense vectors."""
    dense = service.embed_query(question, return_sparse=False).dense
    found: list[str] = []
    for word in re.findall(r"\w*\d\w*", question):
        found += collection.query(dense, n_results=20, where_document={"$contains": word})[
            "documents"
        ][0]
    found += collection.query(dense, n_results=20)["documents"][0]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    with Client() as service:
        collection = store(connect(), service, PASSAGES)
        ranking = service.rerank(QUESTION, search(collection, service, QUESTION))
        for score, text in zip(ranking.scores, ranking.passages):
            print(f"{score:.3f}  {text}")

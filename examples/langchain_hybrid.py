"""Hybrid search with LangChain: its Qdrant store finds passages, the reranker sorts them.

pip install ./client langchain-core langchain-qdrant

QDRANT_URL is the address of a server, or ":memory:"; without it, files in the folder qdrant-data
are used. SMART_EMBEDDER_URL is the address of the service, SMART_EMBEDDER_TOKEN its access token if
it has one.
"""

import os
import uuid
from collections.abc import Sequence
from contextlib import closing

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_qdrant import QdrantVectorStore, RetrievalMode
from langchain_qdrant.sparse_embeddings import SparseEmbeddings, SparseVector
from pydantic import ConfigDict
from qdrant_client import QdrantClient, models
from smart_embedder_client import Client

PASSAGES = [
    "Error E42: the pump is blocked. Clean the filter and start again.",
    "Error E43: the lid is open. Close it until it clicks.",
    "Descale the machine every month, or more often where the water is hard.",
    "The guarantee covers two years from the day of purchase.",
]
QUESTION = "The display shows E42, what should I do?"
COLLECTION = "langchain"


class Dense(Embeddings):
    """Dense vectors of the service."""

    def __init__(self, service: Client) -> None:
        self._service = service

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return a vector for each text."""
        return self._service.embed_documents(texts, return_sparse=False).dense.tolist()

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a question."""
        return self._service.embed_query(text, return_sparse=False).dense[0].tolist()


class Sparse(SparseEmbeddings):
    """Sparse vectors of the service."""

    def __init__(self, service: Client) -> None:
        self._service = service

    def embed_documents(self, texts: list[str]) -> list[SparseVector]:
        """Return a vector for each text."""
        vectors = self._service.embed(texts, return_dense=False).sparse
        return [
            SparseVector(indices=vector.indices.tolist(), values=vector.values.tolist())
            for vector in vectors
        ]

    def embed_query(self, text: str) -> SparseVector:
        """Return the vector of a question."""
        return self.embed_documents([text])[0]


class Reranker(BaseDocumentCompressor):
    """Reranker of the service."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    service: Client
    top_n: int = 10

    def compress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks = None,  # noqa: ARG002
    ) -> list[Document]:
        """Return the best `top_n` documents, with their scores in the metadata."""
        ranking = self.service.rerank(query, [document.page_content for document in documents])
        best = zip(ranking.indices[: self.top_n].tolist(), ranking.scores.tolist())
        return [
            Document(
                documents[index].page_content,
                metadata=documents[index].metadata | {"relevance_score": score},
            )
            for index, score in best
        ]


def make_id(passage: str) -> str:
    """Derive the id from the text, so that a second run replaces passages and adds none."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, passage))


def connect() -> QdrantClient:
    """Connect to the server in the environment, or open files in a folder."""
    if "QDRANT_URL" in os.environ:
        return QdrantClient(os.environ["QDRANT_URL"], api_key=os.environ.get("QDRANT_API_KEY"))
    return QdrantClient(path="qdrant-data")


def make_store(qdrant: QdrantClient, service: Client) -> QdrantVectorStore:
    """Open or create a collection of dense and sparse vectors, which are fused by RRF."""
    dense = Dense(service)
    if not qdrant.collection_exists(COLLECTION):
        width = len(dense.embed_query(QUESTION))
        qdrant.create_collection(
            COLLECTION,
            {"dense": models.VectorParams(size=width, distance=models.Distance.COSINE)},
            # No IDF: bge-m3's weights already say how much each word counts.
            {"sparse": models.SparseVectorParams()},
        )
    return QdrantVectorStore(
        qdrant,
        COLLECTION,
        embedding=dense,
        sparse_embedding=Sparse(service),
        retrieval_mode=RetrievalMode.HYBRID,
        vector_name="dense",
        sparse_vector_name="sparse",
    )


def make_retriever(store: QdrantVectorStore, service: Client) -> Runnable[str, list[Document]]:
    """Return a chain that finds 20 documents for a question, and reranks them."""
    reranker = Reranker(service=service)
    return {
        "documents": store.as_retriever(search_kwargs={"k": 20}),
        "query": RunnablePassthrough(),
    } | RunnableLambda(lambda found: reranker.compress_documents(**found))


if __name__ == "__main__":
    with closing(connect()) as qdrant, Client() as service:
        store = make_store(qdrant, service)
        store.add_texts(PASSAGES, ids=[make_id(passage) for passage in PASSAGES])
        for document in make_retriever(store, service).invoke(QUESTION):
            print(f"{document.metadata['relevance_score']:.3f}  {document.page_content}")

"""Hybrid search with LlamaIndex: its Qdrant store finds passages, the reranker sorts them.

pip install ./client llama-index-core llama-index-vector-stores-qdrant

QDRANT_URL is the address of a server, or ":memory:"; without it, files in the folder qdrant-data
are used. SMART_EMBEDDER_URL is the address of the service, SMART_EMBEDDER_TOKEN its access token if
it has one.
"""

import os
import uuid
from collections import defaultdict
from contextlib import closing

from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.types import VectorStoreQueryMode, VectorStoreQueryResult
from llama_index.vector_stores.qdrant import QdrantVectorStore
from pydantic import ConfigDict
from qdrant_client import QdrantClient
from smart_embedder_client import Client

PASSAGES = [
    "Error E42: the pump is blocked. Clean the filter and start again.",
    "Error E43: the lid is open. Close it until it clicks.",
    "Descale the machine every month, or more often where the water is hard.",
    "The guarantee covers two years from the day of purchase.",
]
QUESTION = "The display shows E42, what should I do?"


class Dense(BaseEmbedding):
    """Dense vectors of the service."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    service: Client

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self.service.embed_documents(texts, return_sparse=False).dense.tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self.service.embed_query(query, return_sparse=False).dense[0].tolist()

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


class Reranker(BaseNodePostprocessor):
    """Reranker of the service."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    service: Client
    top_n: int = 10

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        ranking = self.service.rerank(query_bundle.query_str, [node.text for node in nodes])
        best = zip(ranking.indices[: self.top_n].tolist(), ranking.scores.tolist())
        return [NodeWithScore(node=nodes[index].node, score=score) for index, score in best]


def reciprocal_rank_fusion(
    dense: VectorStoreQueryResult, sparse: VectorStoreQueryResult, top_k: int = 20, **_: object
) -> VectorStoreQueryResult:
    """Add 3 / rank by dense vectors and 1 / rank by sparse ones."""
    nodes, scores = {}, defaultdict(float)
    for weight, ranking in ((3, dense), (1, sparse)):
        for rank, node in enumerate(ranking.nodes or (), start=1):
            nodes[node.node_id] = node
            scores[node.node_id] += weight / rank
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:top_k]
    return VectorStoreQueryResult(
        nodes=[nodes[id_] for id_ in best], similarities=[scores[id_] for id_ in best], ids=best
    )


def make_id(passage: str) -> str:
    """Derive the id from the text, so that a second run replaces passages and adds none."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, passage))


def connect() -> QdrantClient:
    """Connect to the server in the environment, or open files in a folder."""
    if "QDRANT_URL" in os.environ:
        return QdrantClient(os.environ["QDRANT_URL"], api_key=os.environ.get("QDRANT_API_KEY"))
    return QdrantClient(path="qdrant-data")


def make_store(qdrant: QdrantClient, service: Client) -> QdrantVectorStore:
    """Open or create a collection of dense and sparse vectors."""

    def sparse(texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
        vectors = service.embed(texts, return_dense=False).sparse
        return (
            [vector.indices.tolist() for vector in vectors],
            [vector.values.tolist() for vector in vectors],
        )

    return QdrantVectorStore(
        "llamaindex",
        client=qdrant,
        enable_hybrid=True,
        sparse_doc_fn=sparse,
        sparse_query_fn=sparse,
        hybrid_fusion_fn=reciprocal_rank_fusion,
    )


if __name__ == "__main__":
    with closing(connect()) as qdrant, Client() as service:
        index = VectorStoreIndex.from_vector_store(
            make_store(qdrant, service), embed_model=Dense(service=service)
        )
        index.insert_nodes([TextNode(id_=make_id(text), text=text) for text in PASSAGES])
        retriever = index.as_retriever(
            vector_store_query_mode=VectorStoreQueryMode.HYBRID,
            similarity_top_k=100,
            sparse_top_k=100,
            hybrid_top_k=20,
        )
        found = retriever.retrieve(QUESTION)
        for node in Reranker(service=service).postprocess_nodes(found, query_str=QUESTION):
            print(f"{node.score:.3f}  {node.text}")

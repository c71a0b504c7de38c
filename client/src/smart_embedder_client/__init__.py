"""The Python client of Smart Embedder: vectors as numpy arrays, and reranking."""

from smart_embedder_client.answers import (
    Embeddings,
    Health,
    Ranking,
    SparseVector,
    Tokenized,
    TokenStrings,
)
from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.client import Client
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.options import EmbedOptions, RerankOptions, RerankWeights
from smart_embedder_client.streams import StreamedText

__version__ = "2.0.0-dev"

__all__ = [
    "AsyncClient",
    "Client",
    "EmbedOptions",
    "Embeddings",
    "Health",
    "Ranking",
    "RerankOptions",
    "RerankWeights",
    "SmartEmbedderError",
    "SparseVector",
    "StreamedText",
    "TokenStrings",
    "Tokenized",
]

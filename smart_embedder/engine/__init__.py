"""The engine: texts in, vectors and scores out, one device thread, fair to everyone.

Knows nothing of HTTP.
"""

from smart_embedder.engine.engine import Engine
from smart_embedder.engine.records import EmbeddingOptions, TruncationOptions
from smart_embedder.engine.requests.reranking import (
    ClassificationRequest,
    FusionWeights,
    RerankRequest,
)
from smart_embedder.engine.scheduling.batcher import DEFAULT_URGENCY

__all__ = [
    "DEFAULT_URGENCY",
    "ClassificationRequest",
    "EmbeddingOptions",
    "Engine",
    "FusionWeights",
    "RerankRequest",
    "TruncationOptions",
]

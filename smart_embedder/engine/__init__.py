"""The engine: texts in, vectors and scores out, one device thread, fair to everyone.

Knows nothing of HTTP.
"""

from smart_embedder.engine.engine import Engine
from smart_embedder.engine.records import (
    DEFAULT_URGENCY,
    ClassificationRequest,
    EmbeddingOptions,
    EmbedRequest,
    FusionWeights,
    RerankRequest,
    TruncationOptions,
)

__all__ = [
    "DEFAULT_URGENCY",
    "ClassificationRequest",
    "EmbedRequest",
    "EmbeddingOptions",
    "Engine",
    "FusionWeights",
    "RerankRequest",
    "TruncationOptions",
]

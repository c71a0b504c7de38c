"""The engine: texts in, vectors and scores out, one device thread, fair to everyone.

Knows nothing of HTTP.
"""

from app.engine.engine import Engine
from app.engine.records import EmbeddingOptions, TruncationOptions
from app.engine.requests.reranking import ClassificationRequest, FusionWeights, RerankRequest
from app.engine.scheduling.batcher import DEFAULT_URGENCY

__all__ = [
    "DEFAULT_URGENCY",
    "ClassificationRequest",
    "EmbeddingOptions",
    "Engine",
    "FusionWeights",
    "RerankRequest",
    "TruncationOptions",
]

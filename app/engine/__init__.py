"""The engine: texts in, vectors and scores out, one device thread, fair to everyone.

Knows nothing of HTTP.
"""

from app.engine.batcher import DEFAULT_URGENCY
from app.engine.classification import ClassificationRequest
from app.engine.engine import Engine
from app.engine.late_interaction import FusionWeights
from app.engine.options import EmbeddingOptions, TruncationOptions
from app.engine.reranking import RerankRequest

__all__ = [
    "DEFAULT_URGENCY",
    "ClassificationRequest",
    "EmbeddingOptions",
    "Engine",
    "FusionWeights",
    "RerankRequest",
    "TruncationOptions",
]

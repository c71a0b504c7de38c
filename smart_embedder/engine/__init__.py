"""The engine: texts in, vectors and scores out, one device thread, fair to everyone.

Knows nothing of HTTP.
"""

from smart_embedder.engine.engine import Engine

__all__ = ["Engine"]

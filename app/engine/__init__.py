"""The engine: texts in, vectors out, one device thread, fair to everyone. Knows nothing of HTTP."""

from app.engine.engine import Engine

__all__ = ["Engine"]

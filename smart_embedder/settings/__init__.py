"""Settings: each declared once, read from flags, the environment and .env."""

from smart_embedder.settings.declaration import Settings
from smart_embedder.settings.types import FLOAT8, INT8, LATE_INTERACTION, NO_RERANKER

__all__ = ["FLOAT8", "INT8", "LATE_INTERACTION", "NO_RERANKER", "Settings"]

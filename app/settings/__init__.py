"""Settings: each declared once, read from flags, the environment and .env."""

from app.settings.declaration import Settings
from app.settings.types import INT8, LATE_INTERACTION, NO_RERANKER

__all__ = ["INT8", "LATE_INTERACTION", "NO_RERANKER", "Settings"]

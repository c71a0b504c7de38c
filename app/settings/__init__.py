"""Settings: each declared once, read from flags, the environment and .env."""

from app.settings.declaration import Settings

__all__ = ["Settings"]

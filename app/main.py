"""`uvicorn app.main:app` serves the service of `smart_embedder`."""

from typing import Any

from smart_embedder import main


def __getattr__(name: str) -> Any:
    """Create `app` when an ASGI server first asks for it."""
    return getattr(main, name)

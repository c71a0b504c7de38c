"""`uvicorn smart_embedder.main:app` served until version 2; it is `app.main:app` now."""

import sys


def __getattr__(name: str) -> object:
    """Say where the app is when a server asks for it."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    sys.exit("smart_embedder is the library: python -m app starts the service, in a checkout")

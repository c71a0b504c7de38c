"""Smart Embedder: everything that a hybrid search calls, on the user's own hardware."""

__version__ = "2.0.0-dev"

"""Smart Embedder: everything that a hybrid search calls, on the user's own hardware."""

__version__ = "0.1.0"

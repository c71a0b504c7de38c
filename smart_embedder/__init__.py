"""Smart Embedder: everything that a hybrid search calls, on the user's own hardware."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smart_embedder.engine import Engine, SyncEngine, Vectors

__version__ = "2.0.0-dev"

__all__ = ["Engine", "SyncEngine", "Vectors", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the library on first use, so that importing a submodule does not import all."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("smart_embedder.engine"), name)

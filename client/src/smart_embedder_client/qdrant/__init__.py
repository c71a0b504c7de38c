"""A Qdrant collection with dense, sparse and ColBERT vectors, on a server or in a folder."""

from smart_embedder_client.qdrant.store import EDGE, QdrantError, Store, Target


def open_store(target: Target) -> Store:
    """Connect to a collection, which need not exist.

    Raises:
        QdrantError: Nothing answers, or another process has the folder open.
        ImportError: The package that the address requires is not installed.
    """
    # The packages are optional: only one of the two may be installed.
    if target.address.startswith(EDGE):
        from smart_embedder_client.qdrant.edge_store import EdgeStore  # noqa: PLC0415

        return EdgeStore(target)
    if not target.address.startswith(("http://", "https://")):
        raise QdrantError(f"{target.address} is neither http://host:6333 nor edge:FOLDER")
    from smart_embedder_client.qdrant.server_store import ServerStore  # noqa: PLC0415

    return ServerStore(target)

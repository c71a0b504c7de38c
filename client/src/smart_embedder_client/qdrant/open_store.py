"""From an address to a collection."""

from dataclasses import dataclass

from smart_embedder_client.qdrant.store import Store

EDGE = "edge:"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a collection is.

    Attributes:
        address: `http://host:6333`, a folder of Qdrant's engine in Python, `:memory:`, or
            `edge:FOLDER` for Qdrant Edge.
        collection: Its name.
        api_key: Of the server, if it has one.
        use_grpc: Use gRPC where the server answers it.
        grpc_port: Of the server.
        timeout: Seconds until a request has failed.
    """

    address: str
    collection: str
    api_key: str | None = None
    use_grpc: bool = True
    grpc_port: int = 6334
    timeout: int = 60


def open_store(target: Target) -> Store:
    """Connect to a collection, which need not exist.

    Raises:
        QdrantError: Nothing answers, or another process has the folder open.
        ImportError: Of the package that the address needs.
    """
    # Each of the two packages is needed for its own addresses alone.
    if target.address.startswith(EDGE):
        from smart_embedder_client.qdrant.edge_store import EdgeStore  # noqa: PLC0415

        return EdgeStore(target.address.removeprefix(EDGE), target.collection)
    from smart_embedder_client.qdrant.client_store import ClientStore  # noqa: PLC0415

    return ClientStore(
        target.address,
        target.collection,
        api_key=target.api_key,
        use_grpc=target.use_grpc,
        grpc_port=target.grpc_port,
        timeout=target.timeout,
    )

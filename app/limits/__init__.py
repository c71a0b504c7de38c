"""How many requests a client may send: whose request it is, and what is left of its budget."""

from app.limits.address import Network, client_address, network_key, unmapped
from app.limits.buckets import Buckets, MemoryBuckets
from app.limits.shared import SharedBuckets

__all__ = [
    "Buckets",
    "MemoryBuckets",
    "Network",
    "SharedBuckets",
    "client_address",
    "network_key",
    "unmapped",
]

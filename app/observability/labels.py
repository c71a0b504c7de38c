"""The values of the metrics' labels; each has its series from the start."""

from typing import Final

STATUSES: Final = ("success", "client_error", "error", "timeout")
REJECTION_REASONS: Final = (
    "backpressure",
    "rate_limit",
    "auth",
    "body_too_large",
    "loading",
    "model",
    "draining",
    "unhealthy",
    "disabled",
    "origin",
)
EMBEDDING_ENDPOINT: Final = "/embeddings/"
RERANK_ENDPOINT: Final = "/rerank"
# Where a vector was found: in memory, in Redis, or in a computation that was under way.
CACHE_SOURCES: Final = ("memory", "redis", "in_flight")
# The values of the label `endpoint`: the native one, and one for each operation of another dialect.
EMBEDDING_ENDPOINTS: Final = (
    EMBEDDING_ENDPOINT,
    "/embeddings/stream",
    "/v1/embeddings",
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/similarity",
    "/tokenize",
    "/decode",
    "/v2/embed",
    "/api/v1/embed",
)

"""Which requests ask for work: the ones that are counted and limited."""

from starlette.types import Scope

from app.observability.metrics import EMBEDDING_ENDPOINT, RERANK_ENDPOINT

_ENDPOINTS = {
    EMBEDDING_ENDPOINT.rstrip("/"): EMBEDDING_ENDPOINT,
    RERANK_ENDPOINT: RERANK_ENDPOINT,
}


def working_endpoint(scope: Scope) -> str | None:
    """The endpoint, as metrics name it, of a POST that does work; None for every other request."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    # The router's patterns also match a line feed at the end (%0A); no such request may slip by.
    return _ENDPOINTS.get(scope["path"].rstrip("/\n"))

"""One spelling for each path, so that everything inside agrees on what was asked for."""

from starlette.types import ASGIApp, Receive, Scope, Send

from app.observability.metrics import EMBEDDING_ENDPOINT


class UnifyPath:
    """Takes slashes from the end of the path, where they change nothing.

    The one path that is written with a slash keeps it. The router's patterns also match a line feed
    at the end (%0A): it goes too, or such a request would slip by what compares paths.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the path as the routes do, and go on."""
        if scope["type"] == "http":
            bare = scope["path"].rstrip("/\n")
            embeddings = bare == EMBEDDING_ENDPOINT.rstrip("/")
            scope["path"] = EMBEDDING_ENDPOINT if embeddings else bare or "/"
        await self.app(scope, receive, send)

"""Notes the address that a request comes from, for whatever counts by client."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.access.client_address import Network, client_address, network_key, unmapped


class NoteClient:
    """Leaves the client's address in `scope["state"]`, where `client_key` reads it.

    Only `trusted_proxies` may speak for a client through X-Forwarded-For.
    """

    def __init__(self, app: ASGIApp, trusted_proxies: Sequence[Network]) -> None:
        self.app = app
        self._trusted_proxies = [unmapped(network) for network in trusted_proxies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note the address and go on."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["client_address"] = self._address_of(scope)
        await self.app(scope, receive, send)

    def _address_of(self, scope: Scope) -> str:
        peer, _ = scope["client"] or ("", 0)
        forwarded_for = ",".join(Headers(scope=scope).getlist("x-forwarded-for"))
        return network_key(client_address(peer, forwarded_for, self._trusted_proxies))

"""A fixed address for a server that is killed and restarted on another port."""

import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.support.waiting import LIMIT

_PIECE = 65_536


class Relay:
    """Forwards connections to `port`; while that is None, it closes and counts them.

    The first connections are cut after `after` bytes of the response, one number for each.
    """

    def __init__(self, after: Iterable[int] = ()) -> None:
        self.port: int | None = None
        self.refused = 0
        self._after = iter(after)
        self._servers: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def connect_to(self, url: str) -> None:
        """Forward connections to this server from now on."""
        self.port = urlsplit(url).port

    def disconnect(self) -> None:
        """Close all connections, as a server that exits, and forward none."""
        self.port = None
        for server in list(self._servers):
            with suppress(OSError):  # The other end has closed it.
                server.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.port or 0))
        except OSError:
            client.close()
            self.refused += 1
            return
        self._servers.add(server)
        ends = (client, server, next(self._after, None))
        threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket, most: int | None) -> None:
        """Forward both ways, until either end is closed; then close both."""
        with client, server:
            upstream = threading.Thread(target=_copy, args=(client, server), daemon=True)
            upstream.start()
            _copy(server, client, most)
            upstream.join()
            self._servers.discard(server)


def _copy(source: socket.socket, sink: socket.socket, most: int | None = None) -> None:
    left = most
    with suppress(OSError):
        while piece := source.recv(_PIECE if left is None else min(left, _PIECE)):
            sink.sendall(piece)
            left = None if left is None else left - len(piece)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

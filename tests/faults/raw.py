"""Raw sockets for clients that misbehave."""

import socket

from tests.support.server import RunningServer
from tests.support.waiting import LIMIT


def address_of(server: RunningServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def connect(server: RunningServer, *, receive_buffer: int | None = None) -> socket.socket:
    """Open a connection; a small `receive_buffer` makes a slow reader."""
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(LIMIT)
    raw.connect(address_of(server))
    return raw


def head(length: int, path: str = "/embeddings/") -> bytes:
    """Return the head of a POST with a JSON body of `length` bytes."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def read_status(raw: socket.socket) -> int:
    """Read the status of the response; 0 if the connection ended without one."""
    line = raw.recv(65_536).partition(b"\r\n")[0].split()
    return int(line[1]) if len(line) > 1 else 0

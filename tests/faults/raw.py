"""Sockets for clients that do not behave."""

import socket
from collections.abc import Iterator

from tests.support.server import RunningServer


def address_of(server: RunningServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def connect(server: RunningServer, *, receive_buffer: int | None = None) -> socket.socket:
    """A bare connection; a small `receive_buffer` makes the other side feel a slow reader."""
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(60)
    raw.connect(address_of(server))
    return raw


def head(length: int, path: str = "/embeddings/") -> bytes:
    """The head of a POST that announces a JSON body of `length` bytes."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def read_status(raw: socket.socket) -> int:
    """The status of the answer; 0 where the connection ended without one."""
    line = raw.recv(65_536).partition(b"\r\n")[0].split()
    return int(line[1]) if len(line) > 1 else 0


def is_closed(raw: socket.socket) -> bool:
    """Whether the other side ends the connection within the socket's own timeout."""
    try:
        while raw.recv(65_536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def read_answers(raw: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Status and body of each answer of known length, until the connection ends."""
    stream = raw.makefile("rb")
    while line := stream.readline():
        headers = dict(iter(lambda: stream.readline().strip().lower().partition(b": ")[::2], END))
        yield int(line.split()[1]), stream.read(int(headers[b"content-length"]))


END = (b"", b"")

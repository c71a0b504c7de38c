"""Ports for servers that cannot choose one themselves and tell which it is."""

import socket


def free_port() -> int:
    """A loopback port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

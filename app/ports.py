"""Checks before the slow parts of the start whether a port is free, and who can reach it.

Imports only the standard library, because the launcher uses it too.
"""

import errno
import os
import socket
from ipaddress import ip_address

from smart_embedder.errors import StartupError

# Accepts connections over IPv4 as well, where the system can.
BOTH_FAMILIES = "::"


def require_port(host: str, port: int) -> None:
    """Raise `StartupError` if the port cannot be bound; uvicorn would only log it."""
    only_ipv6 = host != BOTH_FAMILIES or not socket.has_dualstack_ipv6()
    try:
        for family, kind, number, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, number) as probe:
                if os.name == "posix":  # As asyncio does; on Windows it would take the port over.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if probe.family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_ipv6)
                probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} of {host} is in use: stop the program there, or set another PORT"
            ) from error
        raise StartupError(
            f"HOST={host} PORT={port} cannot be listened on: {error.strerror}"
        ) from error


def listen_on_both_families(host: str, port: int) -> list[socket.socket] | None:
    """Return a socket that accepts IPv4 and IPv6 if the host is `::`; else None.

    asyncio would restrict the socket to IPv6.
    """
    if host != BOTH_FAMILIES or not socket.has_dualstack_ipv6():
        return None
    return [socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)]


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach a port of this host name or address."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return all(ip_address(address[0]).is_loopback for *_, address in found)

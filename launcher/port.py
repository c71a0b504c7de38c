"""The port, tried before minutes are spent on what would end at a taken one."""

import errno
import os
import socket
from collections.abc import Mapping

from launcher.console import LaunchError

_HIGHEST = 65535


def port_of(settings: Mapping[str, str]) -> int:
    """Return the port that the settings name, as the app and the compose files read it."""
    text = settings.get("PORT", "8000").strip()
    if not (text.isascii() and text.isdecimal() and int(text) <= _HIGHEST):
        raise LaunchError(f"PORT={text} is not a port: it is a number from 0 to {_HIGHEST}.")
    return int(text)


def require_free_port(host: str, port: int) -> None:
    """Raise `LaunchError` where nobody could listen on the port."""
    try:
        for family, kind, number, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, number) as probe:
                _bind(probe, address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} of {host} is taken: end what listens there, or set another PORT."
            ) from error
        raise LaunchError(
            f"HOST={host} PORT={port} cannot be listened on: {error.strerror}."
        ) from error


def _bind(probe: socket.socket, address: tuple[object, ...]) -> None:
    if os.name == "posix":  # As the server will: elsewhere it would take another's port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if probe.family == socket.AF_INET6:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    probe.bind(address)

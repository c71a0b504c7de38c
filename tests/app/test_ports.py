"""Ports that can be listened on, and the errors for others."""

import socket
from urllib.parse import urlsplit

import httpx2
import pytest

from app.ports import is_loopback, listen_on_both_families, require_port
from smart_embedder.errors import StartupError


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_free_port_can_be_checked_repeatedly(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        # The system remembers its last connection, as after a restart.
        with socket.create_connection(other.getsockname()):
            other.accept()[0].close()
    for _ in range(2):
        require_port(host, port)
    with socket.create_server((host, port)):
        pass


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(StartupError, match=f"port {port} of {host} is in use"):
                require_port(host, port)
    try:
        other = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match="is in use"):
            require_port("::", port)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        require_port("::1", port)
        with pytest.raises(StartupError, match="is in use"):
            require_port("::", port)


def test_the_ipv6_wildcard_accepts_ipv4_too(serve) -> None:
    assert listen_on_both_families("0.0.0.0", 0) is None
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with serve(HOST="::") as server:
        port = urlsplit(server.url).port
        for address in ("127.0.0.1", "[::1]"):
            answer = httpx2.get(f"http://{address}:{port}/health/live", trust_env=False)
            assert answer.status_code == 200


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_of_another_machine_cannot_be_listened_on(host: str) -> None:
    with pytest.raises(StartupError, match=f"^HOST={host} PORT=80 cannot be listened on: ."):
        require_port(host, 80)


def test_only_an_address_of_this_machine_alone_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.1", "fe80::1%1")))

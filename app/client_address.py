"""Finds the address of the client behind trusted and untrusted proxies.

Each proxy appends the address of its caller to X-Forwarded-For, so only the entries at the right
end can be trusted, as far as trusted proxies wrote them.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeGuard

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_WITH_PORT = re.compile(r"(?:\[(?P<v6>[^\]]*)\](?::\d{1,5})?|(?P<v4>[\d.]+):\d{1,5})", re.ASCII)
_MAPPED = IPv6Network("::ffff:0:0/96")
_CLIENT_PREFIX = 64
_UNKNOWN = "unknown"
# Only the last entries of X-Forwarded-For are read; real chains of proxies are shorter.
_MOST_PROXIES = 100
_PATH_PREFIX = re.compile(r"(?:/[\w.~-]+)+", re.ASCII)


def client_address(peer: str, forwarded_for: str, trusted: Sequence[Network]) -> Address | None:
    """Find the last address in the chain, `forwarded_for` and then `peer`, that is not trusted.

    `forwarded_for` is the whole X-Forwarded-For, several header lines joined by commas. An entry
    counts only if the address after it is trusted. If an entry is not an address, the proxy that
    wrote it counts as the client. Returns None if the peer has no address.
    """
    address = parse_address(peer)
    for entry in reversed(forwarded_for.rsplit(",", _MOST_PROXIES)[-_MOST_PROXIES:]):
        if not _is_trusted(address, trusted):
            break
        if entry.strip():
            earlier = parse_address(entry)
            if earlier is None:
                break
            address = earlier
    return address


def forwarded_prefix(peer: str, prefix: str, trusted: Sequence[Network]) -> str:
    """The path prefix that a trusted proxy has removed, from X-Forwarded-Prefix; else empty."""
    prefix = prefix.strip().rstrip("/")
    if not _PATH_PREFIX.fullmatch(prefix):
        return ""
    return prefix if _is_trusted(parse_address(peer), trusted) else ""


def _is_trusted(address: Address | None, trusted: Sequence[Network]) -> TypeGuard[Address]:
    return address is not None and any(address in network for network in trusted)


def parse_address(text: str) -> Address | None:
    """Parse an address, with or without a port; an IPv4-mapped IPv6 address becomes IPv4."""
    text = text.strip()
    with_port = _WITH_PORT.fullmatch(text)
    if with_port:
        text = with_port["v6"] or with_port["v4"] or ""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def unmap_network(network: Network) -> Network:
    """Convert an IPv4-mapped IPv6 network to IPv4; return any other unchanged."""
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        address = IPv4Address(int(network.network_address) & 0xFFFF_FFFF)
        return IPv4Network((address, network.prefixlen - _MAPPED.prefixlen))
    return network


@lru_cache(maxsize=1024)
def client_key_of_peer(peer: str) -> str:
    """The key of a client that connects without a proxy; cached, as most send many requests."""
    return client_key(parse_address(peer))


def client_key(address: Address | None) -> str:
    """The key of a client: its IPv4 address, or the /64 of an IPv6 address."""
    if address is None:
        return _UNKNOWN
    if isinstance(address, IPv4Address):
        return str(address)
    return str(ip_network((int(address), _CLIENT_PREFIX), strict=False))

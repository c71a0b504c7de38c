"""The address that a request comes from, through trusted and untrusted proxies.

Each proxy appends the address that called it to X-Forwarded-For, so that only the entries at the
right end, which trusted proxies wrote, can be trusted.
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
# Of the entries of X-Forwarded-For at the right end; nobody has so many proxies.
_MOST_PROXIES = 100
_PATH_PREFIX = re.compile(r"(?:/[\w.~-]+)+", re.ASCII)


def client_address(peer: str, forwarded_for: str, trusted: Sequence[Network]) -> Address | None:
    """The right-most address that is not a trusted proxy's; the `peer` itself is the last one.

    `forwarded_for` is the whole X-Forwarded-For, several header lines joined by commas. An entry
    counts only if the address after it is trusted; an entry that is no address ends the search at
    the proxy that wrote it, as do more entries than anybody has proxies. None where the peer itself
    has no address.
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
    """The path that a trusted proxy has removed, from X-Forwarded-Prefix; else empty."""
    prefix = prefix.strip().rstrip("/")
    if not _PATH_PREFIX.fullmatch(prefix):
        return ""
    return prefix if _is_trusted(parse_address(peer), trusted) else ""


def _is_trusted(address: Address | None, trusted: Sequence[Network]) -> TypeGuard[Address]:
    return address is not None and any(address in network for network in trusted)


def parse_address(text: str) -> Address | None:
    """The address in `text`, which may name a port; an IPv4-mapped IPv6 address is its IPv4 one."""
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
    """The IPv4 network of an IPv4-mapped IPv6 one; any other unchanged."""
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        address = IPv4Address(int(network.network_address) & 0xFFFF_FFFF)
        return IPv4Network((address, network.prefixlen - _MAPPED.prefixlen))
    return network


@lru_cache(maxsize=1024)
def client_key_of_peer(peer: str) -> str:
    """The key of a client that no proxy stands before; most send many requests."""
    return client_key(parse_address(peer))


def client_key(address: Address | None) -> str:
    """The key of a client: its IPv4 address, or the /64 that an IPv6 subscriber owns."""
    if address is None:
        return _UNKNOWN
    if isinstance(address, IPv4Address):
        return str(address)
    return str(ip_network((int(address), _CLIENT_PREFIX), strict=False))

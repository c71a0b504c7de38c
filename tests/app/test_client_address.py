"""The client's address: only trusted proxies can name it."""

from ipaddress import IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import client_address as module
from app.client_address import (
    client_address,
    client_key,
    forwarded_prefix,
    parse_address,
    unmap_network,
)

PROXIES = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))

anything = st.text(st.characters(codec="latin-1"), max_size=40)


@pytest.mark.parametrize(
    ("peer", "header", "client"),
    [
        # That of a client which is no proxy is ignored.
        ("203.0.113.1", "198.51.100.1", "203.0.113.1"),
        # The last untrusted address is the client's, in each form in which proxies write it.
        ("10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "1.1.1.1,no address, 198.51.100.1:567 , ,10.0.0.2", "198.51.100.1"),
        ("10.0.0.1", "1.1.1.1,::ffff:198.51.100.1,[fd00::3]:5,10.0.0.4:80", "198.51.100.1"),
        ("fd00::1", "10.0.0.9,[2001:db8::7]:80,::ffff:10.0.0.2,fd00::2", "2001:db8::7"),
        # A malformed entry ends the search.
        ("10.0.0.1", "198.51.100.1,unknown,10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "198.51.100.1,unknown,10.0.0.3,10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "198.51.100.1,_hidden", "10.0.0.1"),
        # If all are trusted, the first is the client's.
        ("10.0.0.1", "fd00::3,10.0.0.2", "fd00::3"),
        ("10.0.0.1", "", "10.0.0.1"),
    ],
)
def test_the_client_is_the_last_untrusted_address_of_x_forwarded_for(peer, header, client) -> None:
    assert client_address(peer, header, PROXIES) == ip_address(client)
    assert client_address(peer, header, ()) == ip_address(peer)


@given(peer=anything, header=anything)
@settings(max_examples=40)
def test_no_x_forwarded_for_raises(peer: str, header: str) -> None:
    client_address(peer, header, (ip_network("0.0.0.0/0"), ip_network("::/0")))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("1.2.3.4", "1.2.3.4"), ("1.2.3.4:567", "1.2.3.4"),
        ("[::1]:5", "::1"), ("[::1]", "::1"), ("::1", "::1"),
        ("::ffff:1.2.3.4", "1.2.3.4"), ("[::ffff:1.2.3.4]:80", "1.2.3.4"),
        *(
            (text, None)
            for text in ("", "host", "a:80", "1.2.3", "1.2.3.4.5", "1.2.3.4:", "1.2.3.4:x")
        ),
        *((text, None) for text in ("1.2.3.4:567890", "010.0.0.1", "[]", "[::1", "::1]:5")),
        ("[::1]5", None), ("٣.1.1.1", None),
    ],
)  # fmt: skip
def test_an_address_may_have_a_port_and_mapped_ones_are_ipv4(text: str, address) -> None:
    assert parse_address(text) == (address and ip_address(address))


def test_the_client_key_of_ipv6_is_its_64() -> None:
    for end in (0, 1, 2**64 - 1):
        assert client_key(IPv6Address((0x20010DB8 << 96) + end)) == "2001:db8::/64"
    assert client_key(IPv6Address((0x20010DB8 << 96) + 2**64)) == "2001:db8:0:1::/64"


def test_the_client_key_of_ipv4_is_its_address_also_if_mapped() -> None:
    assert client_key(parse_address("203.0.113.5")) == "203.0.113.5"
    assert client_key(parse_address("::ffff:203.0.113.5")) == "203.0.113.5"
    assert client_key(None) == "unknown"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("::ffff:10.0.0.1/128", "10.0.0.1/32"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("fd00::/8", "fd00::/8"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("::/0", "::/0"),
    ],
)
def test_a_mapped_network_is_the_ipv4_one(written: str, meant: str) -> None:
    assert unmap_network(ip_network(written)) == ip_network(meant)


def test_only_the_last_hundred_entries_of_x_forwarded_for_are_read(monkeypatch) -> None:
    """A client may send 64 KiB of entries before the one that its proxy adds."""
    looked_at = 0

    def counted(address: object, trusted: object) -> bool:
        nonlocal looked_at
        looked_at += 1
        return True

    monkeypatch.setattr(module, "_is_trusted", counted)
    assert str(client_address("10.0.0.1", "," * 65_000, ())) == "10.0.0.1"
    assert looked_at <= 100


@pytest.mark.parametrize(
    ("peer", "sent", "believed"),
    [
        ("10.0.0.1", "/embed", "/embed"),
        ("10.0.0.1", " /a/b-c.d~e/ ", "/a/b-c.d~e"),
        ("10.0.0.1", "", ""),
        ("10.0.0.1", "/", ""),
        ("10.0.0.1", "embed", ""),
        ("10.0.0.1", "//other.example", ""),
        ("10.0.0.1", "/a b", ""),
        ("10.0.0.1", "/a?b", ""),
        ("203.0.113.1", "/embed", ""),
        ("", "/embed", ""),
    ],
)
def test_x_forwarded_prefix_is_a_path_from_a_trusted_proxy(peer, sent, believed) -> None:
    """The prefix is written into links and scripts of pages."""
    assert forwarded_prefix(peer, sent, PROXIES) == believed

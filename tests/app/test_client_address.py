"""The client's address: only trusted proxies can name it."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

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

trusted = st.one_of(st.ip_addresses(network="10.0.0.0/8"), st.ip_addresses(network="fd00::/8"))
public = st.one_of(
    st.ip_addresses(network="203.0.113.0/24"), st.ip_addresses(network="2001:db8::/32")
)
no_address = st.sampled_from(["unknown", "_hidden", "1.2.3", "1.2.3.4.5", "[::1", "::1]:5", "a:80"])
anything = st.text(st.characters(codec="latin-1"), max_size=40)


def name(address: IPv4Address | IPv6Address, form: int) -> str:
    """The forms in which proxies write an address."""
    if isinstance(address, IPv4Address):
        return [f"{address}", f" {address}:567 ", f"::ffff:{address}"][form]
    return [f"{address}", f" [{address}]:5 ", f"[{address}]"][form]


named = st.builds(name, trusted, st.integers(0, 2))


few = settings(max_examples=40)


@given(
    peer=trusted,
    client=public,
    form=st.integers(0, 2),
    spoofed=anything,
    hops=st.lists(named, max_size=4),
    empty=st.sampled_from(["", " ", ", ,"]),
)
@few
def test_the_last_untrusted_address_of_x_forwarded_for_is_the_client(
    peer, client, form: int, spoofed: str, hops: list[str], empty: str
) -> None:
    header = ",".join([spoofed, name(client, form), empty, *hops])
    assert client_address(str(peer), header, PROXIES) == client
    # That of a client which is no proxy is ignored.
    assert client_address(str(client), header, PROXIES) == client
    assert client_address(str(peer), header, ()) == peer


@given(
    peer=trusted,
    spoofed=public,
    garbage=no_address,
    last=trusted,
    hops=st.lists(named, max_size=3),
)
@few
def test_a_malformed_entry_of_x_forwarded_for_ends_the_search(
    peer, spoofed, garbage: str, last, hops: list[str]
) -> None:
    header = f"{spoofed},{garbage},{last}"
    assert client_address(str(peer), header, PROXIES) == last
    assert client_address(str(peer), f"{spoofed},{garbage}", PROXIES) == peer
    assert client_address(str(peer), ",".join([header, *hops]), PROXIES) != spoofed


def test_the_first_address_is_the_client_if_all_are_trusted() -> None:
    for hops in ([], ["10.0.0.2"], ["fd00::3", "10.0.0.2"]):
        first = ip_address((hops or ["10.0.0.1"])[0])
        assert client_address("10.0.0.1", ",".join(hops), PROXIES) == first


@given(peer=anything, header=anything)
@few
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
            for text in ("", "host", "1.2.3.4:", "1.2.3.4:x", "1.2.3.4:567890", "010.0.0.1", "[]")
        ),
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

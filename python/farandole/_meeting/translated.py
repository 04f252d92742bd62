"""Addresses at which ranks are seen, besides those that they know of themselves: a router may
translate them."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

from farandole._meeting.errors import Words

_BYTES = 20  # of an address: csrc/transport/tcp_address.h


def seen_at(words: Words, address: str) -> Words:
    """The words of a rank whose host is seen at this address; empty: it is this host. The other
    ranks try it last, at the port where the rank listens at the first of its own addresses."""
    own = bytes.fromhex(words.get("addresses", ""))
    if not own or not address:
        return words
    there = ip_address(address.partition("%")[0])
    if isinstance(there, IPv6Address) and there.ipv4_mapped is not None:
        there = there.ipv4_mapped
    family, where = bytes([there.version]), there.packed.ljust(16, b"\0")
    known = {(own[i : i + 1], own[i + 4 : i + _BYTES]) for i in range(0, len(own), _BYTES)}
    if there.is_loopback or there.is_link_local or (family, where) in known:
        return words
    return words | {"addresses": (own + family + own[1:4] + where).hex()}

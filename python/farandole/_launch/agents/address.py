"""Where other hosts reach this one.

A host's name is no answer: it may be known to ssh alone, and Debian's hosts take their own for
127.0.1.1. sshd knows at which address it was reached, and by whom.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_GLOBAL = "00"  # the scope of an address, in if_inet6


class Seen(NamedTuple):
    """Addresses of a connection by ssh; empty where nothing is known."""

    launcher: str = ""
    host: str = ""


def seen_by_sshd(environment: Mapping[str, str]) -> Seen | None:
    """A link's own addresses (fe80::1%eth0) are of no use to others."""
    words = environment.get("SSH_CONNECTION", "").split()
    if len(words) != 4 or "%" in words[0] + words[2]:
        return None
    return Seen(words[0], words[2])


def of_interfaces(wanted: str = "") -> str:
    """The first address of an interface that is up, or of the wanted one; empty if there is none.

    Never that of the loopback, which every host has for itself.
    """
    names = [wanted] if wanted else [name for _, name in socket.if_nameindex()]
    return next(chain(_of_version_4(names), _of_version_6(names)), "")


def is_address(text: str) -> bool:
    return _parsed(text) is not None


def is_loopback(text: str) -> bool:
    """False also for what is no address."""
    address = _parsed(text)
    return address is not None and address.is_loopback


def is_ours(address: str) -> bool:
    """Whether this host has the address."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _of_version_4(names: list[str]) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            request = struct.pack("256s", os.fsencode(name)[:15])
            with suppress(OSError):  # it is gone, or has no such address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
                (flags,) = struct.unpack_from("H", answer, 16)
                if flags & _IFF_UP and not flags & _IFF_LOOPBACK:
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                    yield socket.inet_ntoa(answer[20:24])


def _of_version_6(names: list[str]) -> Iterator[str]:
    with suppress(OSError):  # the kernel has no version 6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name in names and scope == _GLOBAL:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))

"""The addresses of this host's network interfaces."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_GLOBAL, _HOST = "00", "10"  # the scope of an address, in if_inet6


def names() -> list[str]:
    """The names of all interfaces, in the kernel's order."""
    return [name for _, name in socket.if_nameindex()]


def addresses(of: Sequence[str], *, loopback: bool = False) -> Iterator[str]:
    """Addresses of interfaces that are up, of version 4 first; never link-local (fe80::1%eth0).

    ``loopback``: also the one that every host has for itself.
    """
    yield from _of_version_4(of, loopback)
    yield from _of_version_6(of, loopback)


def _of_version_4(of: Sequence[str], loopback: bool) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in of:
            request = struct.pack("256s", os.fsencode(name)[:15])
            with suppress(OSError):  # it is gone, or has no such address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
                (flags,) = struct.unpack_from("H", answer, 16)
                if flags & _IFF_UP and (loopback or not flags & _IFF_LOOPBACK):
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                    yield socket.inet_ntoa(answer[20:24])


def _of_version_6(of: Sequence[str], loopback: bool) -> Iterator[str]:
    scopes = (_GLOBAL, _HOST) if loopback else (_GLOBAL,)
    with suppress(OSError):  # the kernel has no version 6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name in of and scope in scopes:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))

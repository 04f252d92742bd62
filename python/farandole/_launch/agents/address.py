"""Where other hosts reach this one.

A host's name is no answer: it may be known to ssh alone, and Debian's hosts take their own for
127.0.1.1. sshd knows at which address it was reached, and by whom.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from farandole import _interfaces


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
    return next(_interfaces.addresses([wanted] if wanted else _interfaces.names()), "")


def is_address(text: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(text)
        return True
    return False


def is_loopback(text: str) -> bool:
    """False also for what is no address."""
    return is_address(text) and ipaddress.ip_address(text).is_loopback


def is_ours(address: str) -> bool:
    """Whether this host has the address."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True

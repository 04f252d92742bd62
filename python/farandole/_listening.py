"""Where a rank listens, and where ranks look for rank 0, which receives them."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

from farandole import _interfaces
from farandole._core import InvalidArgument, RendezvousError

_MOST_ADDRESSES = 8  # of a rank, as the core keeps them


def listen(master: str, avoid: int) -> list[socket.socket]:
    """At the addresses by which the others may reach this rank, the likeliest first; at each by
    itself, never at all that this host may get. `avoid`: the port where rank 0 will receive."""
    first, *more = own_addresses(master)
    try:
        listeners = [_listener_at(first, avoid)]
    except OSError as error:
        raise RendezvousError(f"this rank cannot listen at {first}: {error.strerror}") from error
    for address in more:
        with suppress(OSError):  # tentative, say
            listeners.append(_listener_at(address, avoid))
    return listeners


def _listener_at(address: str, avoid: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        if listener.getsockname()[1] == avoid:
            with listener:  # meanwhile the kernel chooses another one
                return _listener_at(address, avoid)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def own_addresses(master: str) -> list[str]:
    """Addresses of FARANDOLE_IFACE; else the one from which a route leads to `master`, and then the
    others of this host. Only that one if `master` is a loopback address: all ranks are here. (A
    name may mean the loopback on its own host, and this host on others.)"""
    if iface := os.environ.get("FARANDOLE_IFACE"):
        return _addresses_of(iface)
    others = list(_interfaces.addresses(_interfaces.names()))
    try:
        family, kind, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing: the kernel chooses the route
            first = str(probe.getsockname()[0])
    except OSError as error:
        if isinstance(error, socket.gaierror) and others:  # a pod's name may come later
            return others[:_MOST_ADDRESSES]
        raise RendezvousError(
            f"this rank finds no way to {master}: {error.strerror}; set MASTER_ADDR or "
            "FARANDOLE_IFACE to the network interface that leads to the other hosts"
        ) from error
    if ipaddress.ip_address(first).is_loopback:
        return [first] if is_loopback(master) or not others else others[:_MOST_ADDRESSES]
    return list(dict.fromkeys([first, *others]))[:_MOST_ADDRESSES]


def receiving_at(master: str) -> list[str]:
    """The addresses at which ranks look for the one that has this name: here it may mean the
    loopback, and this host on others."""
    try:
        first = str(socket.getaddrinfo(master, 9, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return [master]  # the attempt to listen there says what is wrong
    meant = ipaddress.ip_address(first)
    if meant.is_unspecified:
        raise RendezvousError(
            f"MASTER_ADDR={master} is no address of a host; set it to one of rank 0's host"
        )
    if not meant.is_loopback or is_loopback(master):
        return [first]
    iface = os.environ.get("FARANDOLE_IFACE")
    more = _interfaces.addresses([iface] if iface else _interfaces.names())
    return list(dict.fromkeys([first, *more]))[:_MOST_ADDRESSES]


def is_loopback(master: str) -> bool:
    """As it is written: no other host reaches this one by it."""
    with suppress(ValueError):
        return ipaddress.ip_address(master).is_loopback
    return master == "localhost"


def _addresses_of(iface: str) -> list[str]:
    found = list(_interfaces.addresses([iface], loopback=True))
    if not found:
        raise InvalidArgument(
            f"FARANDOLE_IFACE={iface} has no address here, or is down; interfaces: "
            f"{', '.join(_interfaces.names())}"
        )
    return found[:_MOST_ADDRESSES]

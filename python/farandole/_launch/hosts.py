"""Horovod's ways to say which hosts a job may use, and how its ranks are shared out to them."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from pathlib import Path

from farandole._launch.agents.address import is_address, is_loopback, is_ours
from farandole._launch.job import LaunchError, Share

_ALWAYS_HERE = ("localhost", "127.0.0.1", "::1", "[::1]")
# A name that ssh takes for nothing else; the address of IPv6 in brackets, since a colon follows.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_VERSION_6 = r"\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]"
_HOST = re.compile(rf"(?:{_NAME}@)?(?:{_NAME}|{_VERSION_6})")


def hosts_of(hosts: str | None, hostfile: Path | None) -> list[Share] | None:
    """The hosts and their slots, each host once; None when nothing is said about them.

    Args:
        hosts: "name:slots,…"; a name alone is one slot.
        hostfile: lines of "name slots=n", empty ones and # comments.

    Raises:
        LaunchError: text that cannot be read, or that is no name of a host.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError("-H and --hostfile are both given; one of them says which hosts")
    if hosts is not None:
        pairs = [share_of(item, f"-H: '{item}'") for item in hosts.split(",")]
    elif hostfile is not None:
        pairs = _of_file(hostfile)
    else:
        return None
    slots: dict[str, int] = {}
    for name, count in pairs:
        slots[name] = slots.get(name, 0) + count
    return [Share(name, count) for name, count in slots.items()]


def shared_out(ranks: int, slots: Iterable[Share]) -> list[Share]:
    """Fills hosts in order; those that get no rank are left out."""
    shares = []
    for host, count in slots:
        here = min(ranks, count)
        ranks -= here
        if here:
            shares.append(Share(host, here))
    return shares


def slots_here(hosts: str | None, hostfile: Path | None) -> int | None:
    """The slots of this host, where only it may be named; None when nothing is said about hosts."""
    slots = hosts_of(hosts, hostfile)
    if slots is None:
        return None
    for name, _ in slots:
        if not is_here(name):
            raise LaunchError(
                f"host {name} is not this one ({socket.gethostname()}): a function runs on this "
                "host alone; 'farandole run' starts a command on several"
            )
    return sum(count for _, count in slots)


def name_of(host: str) -> str:
    """The host's name, without the user and without brackets."""
    return host.rpartition("@")[2].strip("[]")


def is_here(host: str) -> bool:
    """Whether it is this machine, by its name or an address of it."""
    mine = socket.gethostname()
    address = host.strip("[]")  # not of another user
    own = is_address(address) and is_ours(address)
    return own or host in (*_ALWAYS_HERE, mine, mine.partition(".")[0])


def is_everywhere(host: str) -> bool:
    """Whether the name means a different machine on each host."""
    return host in _ALWAYS_HERE or is_loopback(host.strip("[]"))


def share_of(item: str, where: str, slots: int = 1) -> Share:
    """Reads 'name:slots', or a name alone. `where`: its source, for messages.

    Raises:
        LaunchError: it is something else.
    """
    name, colon, count = item.strip().rpartition(":")
    if not colon or "]" in count:
        name, count = item.strip(), str(slots)
    return Share(_checked(name, where), _number(count, where, "name:slots"))


def _of_file(path: Path) -> list[Share]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise LaunchError(f"--hostfile: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LaunchError(f"--hostfile: {path} is not text in UTF-8") from error
    shares = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hostfile: {path}, line {number}: '{line.strip()}'"
        slots = "1"
        if len(words) > 2 or (len(words) == 2 and not words[1].startswith("slots=")):
            raise LaunchError(f"{where} is not 'name slots=n'")
        if len(words) == 2:
            slots = words[1].removeprefix("slots=")
        count = _number(slots, where, "name slots=n")
        shares.append(Share(_checked(words[0], where), count))
    if not shares:
        raise LaunchError(f"--hostfile: {path} names no host")
    return shares


def _checked(name: str, where: str) -> str:
    if not _HOST.fullmatch(name):
        raise LaunchError(
            f"{where}: {name!r} is no name of a host; write letters, digits, '.', '-' and '_', "
            "with user@ in front if needed, and addresses of IPv6 in brackets"
        )
    return name


def _number(text: str, where: str, form: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise LaunchError(f"{where} is not '{form}' with at least 1 slot")
    return int(text)

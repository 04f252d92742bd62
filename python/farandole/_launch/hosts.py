"""Horovod's ways to say which hosts a job may use, of which one is allowed: this one."""

from __future__ import annotations

import socket
from pathlib import Path

from farandole._launch.job import LaunchError

_ALWAYS_HERE = ("localhost", "127.0.0.1", "::1")


def slots_here(hosts: str | None, hostfile: Path | None) -> int | None:
    """How many ranks the user allows on this host; None when nothing is said about hosts.

    Args:
        hosts: "name:slots,…"; a name alone is one slot.
        hostfile: lines of "name slots=n", empty ones and # comments.

    Raises:
        LaunchError: text that cannot be read, or a host that is not this one.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError("-H and --hostfile are both given; one of them says which hosts")
    if hosts is not None:
        pairs = [_of_list(item) for item in hosts.split(",")]
    elif hostfile is not None:
        pairs = _of_file(hostfile)
    else:
        return None
    for name, _ in pairs:
        if not _is_here(name):
            raise LaunchError(
                f"host {name} is not this one ({socket.gethostname()}): jobs of more than one "
                "host come later"
            )
    return sum(slots for _, slots in pairs)


def _of_list(item: str) -> tuple[str, int]:
    name, colon, slots = item.strip().rpartition(":")
    if not colon:
        name, slots = item.strip(), "1"
    return name, _number(slots, f"-H: '{item}'", "name:slots")


def _of_file(path: Path) -> list[tuple[str, int]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise LaunchError(f"--hostfile: {path}: {error.strerror}") from error
    pairs = []
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
        pairs.append((words[0], _number(slots, where, "name slots=n")))
    if not pairs:
        raise LaunchError(f"--hostfile: {path} names no host")
    return pairs


def _number(text: str, where: str, form: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise LaunchError(f"{where} is not '{form}' with at least 1 slot")
    return int(text)


def _is_here(name: str) -> bool:
    mine = socket.gethostname()
    return name in (*_ALWAYS_HERE, mine, mine.partition(".")[0])

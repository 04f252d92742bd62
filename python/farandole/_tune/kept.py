"""The file in which the table of this kind of host is kept.

Lines of ``name=value``, between the format's name and a checksum: what kind of host it is for, when
and with how many ranks it was measured, how noisy that was, how well the model fits, and the
numbers themselves, in seconds. ``farandole run`` looks here before it starts anything, and rank 0
before it meets the others, so this module imports next to nothing: pathlib alone would take 5 ms.
"""
# ruff: noqa: PTH111, PTH123

from __future__ import annotations

import os
from binascii import crc32
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import farandole

_FORMAT = "farandole tuning table 1"
_CHECK = "check="
_MOST_BYTES = 16 << 10  # of a file
MOST_NOISE = 0.25  # of a measurement that is used


class NotBelieved(Exception):
    """Why a file is not used."""


class Kept(NamedTuple):  # a dataclass would import inspect: ranks start that much later
    """The contents of a file."""

    kind: dict[str, str]  # of host
    measured: str  # when
    ranks: int
    noise: float  # by how much slow readings exceeded quick ones: 0.05 is quiet
    tries: int  # first uses that have measured
    errors: dict[str, float]  # median |predicted / measured - 1| of each family
    seconds: dict[str, float]

    @property
    def is_noisy(self) -> bool:
        return self.noise > MOST_NOISE


# ---- the kind of host ----


@cache
def kind() -> dict[str, str]:
    """The facts that times depend on. A table is used on hosts where all of them are the same."""
    found = {
        "farandole": farandole.__version__,
        "kernel": os.uname().release,
        "processor": line_of("/proc/cpuinfo", "model name") or os.uname().machine,
        "cores": str(os.cpu_count()),  # not the usable ones: a rank may be bound to one of them
        "numa nodes": first_line("/sys/devices/system/node/online"),
        "huge pages": first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "ptrace scope": first_line("/proc/sys/kernel/yama/ptrace_scope"),
    }
    return {
        name: value.encode("ascii", "backslashreplace").decode() for name, value in found.items()
    }


def usable_cores() -> int:
    """How many ranks can run at once; a rank that is bound to one core is not alone."""
    mine = len(os.sched_getaffinity(0))
    return mine if mine > 1 else os.cpu_count() or 1


def first_line(path: str) -> str:
    with suppress(OSError), open(path, errors="replace") as file:
        return file.readline().strip()
    return ""


def line_of(path: str, name: str) -> str:
    with suppress(OSError), open(path, errors="replace") as file:
        for line in file:
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def path_here() -> str:
    """The file of this kind of host. ``NotBelieved`` where there is no place for it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):
        base = os.path.expanduser("~/.cache")
    if not base.startswith("/"):
        raise NotBelieved("there is no home directory to keep it in")
    return f"{base}/farandole/tuning-{crc32(repr(kind()).encode()):08x}.txt"


# ---- reading ----


def read(path: str, *, any_kind: bool = False) -> Kept:
    """Reads a file. ``NotBelieved`` says what is wrong with it; ``OSError`` that it is not there.

    With `any_kind`, one that was measured on another kind of host is believed too, if this version
    of farandole wrote it.
    """
    with open(path, "rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    body, _, check = raw.rpartition(_CHECK.encode())
    if len(raw) > _MOST_BYTES or not body.startswith(f"{_FORMAT}\n".encode()):
        raise NotBelieved(f"it is no {_FORMAT}")
    if check != _check_of(body):
        raise NotBelieved("it is damaged")
    kept = _parse(body.decode("ascii", "replace"))
    _require_kind(kept.kind, any_kind)
    return kept


def _check_of(body: bytes) -> bytes:
    return b"%08x\n" % crc32(body)


def _parse(text: str) -> Kept:
    parts: dict[str, dict[str, str]] = {"": {}, "kind": {}, "error": {}, "seconds": {}}
    try:
        for line in text.splitlines()[1:]:
            name, _, value = line.partition("=")
            part, _, rest = name.rpartition(".")
            parts[part][rest] = value
        own = parts[""]
        return Kept(
            kind=parts["kind"],
            measured=own["measured"],
            ranks=int(own["ranks"]),
            noise=float(own["noise"]),
            tries=int(own["tries"]),
            errors={name: float(value) for name, value in parts["error"].items()},
            seconds={name: float(value) for name, value in parts["seconds"].items()},
        )
    except (KeyError, ValueError):
        raise NotBelieved("numbers are missing") from None


def _require_kind(theirs: dict[str, str], any_kind: bool) -> None:
    ours = kind()
    for name in ("farandole",) if any_kind else ours:
        if theirs.get(name) != ours[name]:
            raise NotBelieved(f"it is for {name} {theirs.get(name)!r}, this is {ours[name]!r}")


# ---- writing ----


def write(path: str, kept: Kept) -> None:
    """Writes a file that only its owner reads, all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    lines = [_FORMAT]
    lines += [f"kind.{name}={value}" for name, value in kept.kind.items()]
    lines += [f"{name}={getattr(kept, name)}" for name in ("measured", "ranks", "noise", "tries")]
    lines += [f"error.{name}={value}" for name, value in kept.errors.items()]
    lines += [f"seconds.{name}={value!r}" for name, value in kept.seconds.items()]
    body = ("\n".join(lines) + "\n").encode("ascii")
    _replace(path, body + _CHECK.encode() + _check_of(body))


def _replace(path: str, content: bytes) -> None:
    import tempfile
    from pathlib import Path

    directory = Path(path).absolute().parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, beside = tempfile.mkstemp(prefix=f".{Path(path).name}.", dir=directory)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        Path(beside).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(beside).unlink()
        raise

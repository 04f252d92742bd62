"""The counters that ranks show, each in a file in memory (csrc/control/status_page.h).

A file is found among the descriptors of its process, in /proc/PID/fd, so only by processes of the
same user. It begins with a table of its fields, so a job of another version is read as well. A
launcher shows the ranks of other hosts in a file of its own.

Any process of the user may show anything under these names: whatever is in a file, it is a status
or none.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

from farandole import _json
from farandole._words import printable

_PAGE, _ELSEWHERE = "farandole-status", "farandole-elsewhere"
_PAGE_BYTES, _ELSEWHERE_BYTES = 1 << 16, 1 << 24  # that are read at most
_TRIES = 8  # a record is being written: its version is odd, or another one in a second copy
_LEAVING, _LEFT = 2, 3  # RankState in csrc/transport/segment.h
_TICKS = os.sysconf("SC_CLK_TCK")
_LONGEST_TEXT = 512  # characters
_FIRST_PAUSE, _LONGEST = 1.0, 30.0  # seconds between two looks for pages that are missing
_MOST_RANKS = 64  # that one is shown to wait for
_WRONG = (ValueError, KeyError, TypeError, struct.error)  # of a file that is none of ours


class Status(NamedTuple):
    """One rank. Times are seconds, points in time seconds since the epoch; 0.0: never."""

    job: str
    host: str
    rank: int
    size: int
    pid: int
    state: str  # running, stopped, leaving, left
    joined: float
    operations: int  # that have ended
    bytes: int  # its own input, of operations that have begun
    steps: int  # of training, as far as the hook knows them
    stepped: float  # when the last one ended
    waited_for_ranks: float  # until the others had begun an operation
    waited_for_data: float  # of ranks that had
    waits_since: float
    waits_in: str  # "all_reduce #41 'bucket 3'"
    waits_for: list[int]  # the first few
    verdict: str  # why it has failed
    processor: float  # seconds that its process has computed
    seen: float  # when this was read

    @property
    def all_waits_for_ranks(self) -> float:
        """The wait that it is in included."""
        return self.waited_for_ranks + (self.present_wait if self.waits_for else 0.0)

    @property
    def present_wait(self) -> float:
        return max(0.0, self.seen - self.waits_since) if self.waits_since else 0.0


# Python's struct formats of the fields that are read; a page may have more.
_FORMS = {
    "pid": "q", "joined": "q", "rank": "i", "size": "i", "job": "256s", "host": "256s",
    "state": "Q", "operations": "Q", "bytes": "Q", "steps": "Q", "stepped": "q", "for_ranks": "q",
    "for_data": "q", "wait.version": "Q", "wait.since": "q", "wait.ranks": "16h",
    "wait.title": "192s", "verdict.version": "Q", "verdict.text": "512s",
}  # fmt: skip


def parse(page: bytes) -> dict[str, Any]:
    """The fields of a page. Raises one of _WRONG if it is none."""
    table = page.partition(b"\0")[0].decode("ascii").splitlines()
    if table[:1] != ["farandole status"]:
        raise ValueError("it is no page")
    found: dict[str, Any] = {}
    for line in table[1:]:
        name, form, offset = line.split(" ")
        if name in _FORMS:
            if form != _FORMS[name] or not re.fullmatch("[0-9]{1,5}", offset):
                raise ValueError(f"{name} is {form} at {offset}")
            values = struct.unpack_from(f"<{form}", page, int(offset))
            found[name] = values if len(values) > 1 else values[0]
    return found


def status_of(page: bytes) -> Status:
    """Raises one of _WRONG if it is no page."""
    found = parse(page)
    now = time.time()
    wall = now - time.monotonic()  # pages have times of the steady clock
    waits, stepped, state = found["wait.since"] != 0, found["stepped"], found["state"]
    return Status(
        job=_text(found["job"]),
        host=_text(found["host"]),
        rank=found["rank"],
        size=found["size"],
        pid=found["pid"],
        state="left" if state >= _LEFT else "leaving" if state == _LEAVING else "running",
        joined=found["joined"] / 1e9,
        operations=found["operations"],
        bytes=found["bytes"],
        steps=found["steps"],
        stepped=stepped / 1e9 + wall if stepped else 0.0,
        waited_for_ranks=found["for_ranks"] / 1e9,
        waited_for_data=found["for_data"] / 1e9,
        waits_since=found["wait.since"] / 1e9 + wall if waits else 0.0,
        waits_in=_text(found["wait.title"]) if waits else "",
        waits_for=[rank for rank in found["wait.ranks"] if rank >= 0] if waits else [],
        verdict=_text(found["verdict.text"]),
        processor=0.0,
        seen=now,
    )


def of_this_process(page: bytes) -> Status:
    return status_of(page)._replace(processor=_processor(os.getpid()))


def of_process(pid: int) -> list[Status]:
    """One process shows itself in its present world, or a launcher the ranks of other hosts."""
    found = [status for path in _files_of(pid, _ELSEWHERE) for status in _elsewhere(path)]
    own = _newest_page(pid)
    return found if own is None else [*found, own[1]]


def of_user() -> list[Status]:
    """All ranks of this user on this host, and those of other hosts that a launcher here tells of;
    by job and rank."""
    found: dict[tuple[str, str, int], Status] = {}
    processes = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208
    for status in (status for pid in processes for status in of_process(pid)):
        who = status.job, status.host, status.pid
        if who not in found or found[who].seen < status.seen:  # else a launcher's older one
            found[who] = status
    return sorted(found.values(), key=lambda status: (status.job, status.rank))


class Pages:
    """The pages of some processes, found once."""

    def __init__(self, processes: Callable[[], Iterable[int]], job: str) -> None:
        """`processes` is asked while pages of this job are missing, less and less often."""
        self._processes = processes
        self._job = job
        self._paths: dict[int, str] = {}  # by process
        self._pause, self._next = _FIRST_PAUSE, 0.0

    def read(self, expected: int) -> list[Status]:
        """The ranks that run, of which there are `expected`."""
        found = {}
        for pid, path in list(self._paths.items()):
            status = _page_at(path, pid)
            if status is None or status.job != self._job:
                del self._paths[pid]
            else:
                found[pid] = status
        if len(found) < expected and time.monotonic() >= self._next:
            before = len(found)
            self._look_for_more(found)
            self._pause = _FIRST_PAUSE if len(found) > before else min(2 * self._pause, _LONGEST)
            self._next = time.monotonic() + self._pause
        return sorted(found.values(), key=lambda status: status.rank)

    def _look_for_more(self, found: dict[int, Status]) -> None:
        for pid in self._processes():
            page = None if pid in found else _newest_page(pid)
            if page is not None and page[1].job == self._job:
                self._paths[pid], found[pid] = page


class Elsewhere:
    """A file in memory, in which a launcher shows the ranks of other hosts. A new one takes the
    place of the last one under its number, so a reader gets either as a whole."""

    def __init__(self) -> None:
        self._file = -1

    def show(self, statuses: Iterable[Status]) -> None:
        text = json.dumps([status._asdict() for status in statuses]).encode()
        with suppress(OSError):  # no memory or descriptor is left
            new = os.memfd_create(_ELSEWHERE, os.MFD_CLOEXEC)
            try:
                os.write(new, text)
                if self._file < 0:
                    self._file = os.dup(new)
                else:
                    os.dup2(new, self._file, inheritable=False)
            finally:
                os.close(new)


_KINDS = get_type_hints(Status)


def from_fields(fields: dict[str, Any]) -> Status:
    """Reverses _asdict(), of another host. Raises TypeError or ValueError for anything else."""
    made = Status(**fields)
    for name, kind in _KINDS.items():
        if not _fits(getattr(made, name), kind):
            raise ValueError(f"{name} is {getattr(made, name)!r:.40}")
    return made._replace(
        job=printable(made.job), host=printable(made.host), state=printable(made.state),
        waits_in=printable(made.waits_in), verdict=printable(made.verdict),
    )  # fmt: skip


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return (
            isinstance(value, list)
            and len(value) <= _MOST_RANKS
            and all(_fits(item, int) for item in value)
        )
    if kind is str:
        return isinstance(value, str) and len(value) <= _LONGEST_TEXT
    whole = type(value) is int and 0 <= value < 1 << 64
    return whole or (kind is float and type(value) is float and 0 <= value < 1e18)


def _files_of(pid: int, name: str) -> list[str]:
    """Paths of its files of this name; none of another user."""
    folder = f"/proc/{pid}/fd"
    found = []
    with suppress(OSError):  # it has ended, or is another user's
        for number in os.listdir(folder):  # noqa: PTH208 - hundreds, often
            with suppress(OSError):
                if os.readlink(f"{folder}/{number}") == f"/memfd:{name} (deleted)":  # noqa: PTH115
                    found.append(f"{folder}/{number}")
    return found


def _newest_page(pid: int) -> tuple[str, Status] | None:
    """The page of the world that a process joined last, and where it is; None if it is in none."""
    pages = ((path, _page_at(path, pid)) for path in _files_of(pid, _PAGE))
    known = [(path, status) for path, status in pages if status is not None]
    return max(known, key=lambda one: one[1].joined, default=None)


def _page_at(path: str, pid: int) -> Status | None:
    """None if no page of a world that this process is in is there; it may have one from another
    process."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = _whole(file, pid)
        finally:
            os.close(file)
        if status is not None and status.pid in _numbers_of(pid):
            return status
    return None


def _elsewhere(path: str) -> Iterator[Status]:
    with suppress(OSError, *_WRONG):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.pread(file, _ELSEWHERE_BYTES, 0)
        finally:
            os.close(file)
        yield from [from_fields(row) for row in _json.read(text)]


def _whole(file: int, pid: int) -> Status | None:
    """None for what is no page, a page of a world that is over, or of a process that has ended."""
    with suppress(OSError, *_WRONG):
        for _ in range(_TRIES):
            first, second = os.pread(file, _PAGE_BYTES, 0), os.pread(file, _PAGE_BYTES, 0)
            if _versions(first) == _versions(second):
                status = status_of(first)
                return None if status.state == "left" else _alive(status, pid)
    return None


def _versions(page: bytes) -> object:
    found = parse(page)
    versions = [found["wait.version"], found["verdict.version"]]
    return object() if any(version % 2 for version in versions) else versions


def _alive(status: Status, pid: int) -> Status | None:
    """With what the kernel says of its process; None for a zombie."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    if state in "ZXx":
        return None
    stopped = state in "Tt" and status.state == "running"
    return status._replace(processor=_processor(pid), state="stopped" if stopped else status.state)


def _processor(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _numbers_of(pid: int) -> list[int]:
    """A process's numbers, also the one that it has in a container of its own; none once it has
    ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return [int(word) for word in line.split()[1:]]
    return []


def _text(field: bytes) -> str:
    return printable(field.partition(b"\0")[0].decode(errors="replace"))

"""The counters that ranks show, each in a file in memory (csrc/control/status_page.h).

A file is found among the descriptors of its process, in /proc/PID/fd, so only by processes of the
same user. It begins with a table of its fields, so a job of another version is read as well.
Launchers show the ranks of other hosts in a file of their own.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

from farandole import _json

_PAGE, _ELSEWHERE = "farandole-status", "farandole-elsewhere"
_LARGEST = 1 << 24
_TRIES = 8  # a record is being written: its version is odd, or another one in a second copy
_RUNNING, _LEAVING = (0, 1), 2
_TICKS = os.sysconf("SC_CLK_TCK")


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


def parse(page: bytes) -> dict[str, Any] | None:
    """The fields of a page; None if it is none."""
    table = page.partition(b"\0")[0].decode("ascii", "replace").splitlines()
    if table[:1] != ["farandole status"]:
        return None
    found: dict[str, Any] = {}
    for line in table[1:]:
        name, form, offset = line.split(" ")
        values = struct.unpack_from(f"<{form}", page, int(offset))
        found[name] = values if len(values) > 1 else values[0]
    return found


def status_of(page: bytes) -> Status | None:
    """Raises struct.error, ValueError or KeyError for a damaged one."""
    found = parse(page)
    if found is None:
        return None
    state = found["state"]
    return Status(
        job=_text(found["job"]),
        host=_text(found["host"]),
        rank=found["rank"],
        size=found["size"],
        pid=found["pid"],
        state="running" if state in _RUNNING else "leaving" if state == _LEAVING else "left",
        joined=found["joined"] / 1e9,
        operations=found["operations"],
        bytes=found["bytes"],
        steps=found["steps"],
        stepped=found["stepped"] / 1e9,
        waited_for_ranks=found["for_ranks"] / 1e9,
        waited_for_data=found["for_data"] / 1e9,
        waits_since=found["wait.since"] / 1e9,
        waits_in=_text(found["wait.title"]) if found["wait.since"] else "",
        waits_for=[r for r in found["wait.ranks"] if r >= 0] if found["wait.since"] else [],
        verdict=_text(found["verdict.text"]),
        processor=0.0,
        seen=time.time(),
    )


def of_this_process(page: bytes) -> Status:
    status = status_of(page)
    assert status is not None
    return status._replace(processor=_processor(os.getpid()))


def of_process(pid: int) -> list[Status]:
    """One process shows itself in its present world, or a launcher the ranks of other hosts."""
    return [status for file, name in _files_of(pid) for status in _read(file, name)]


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
    """The pages of some processes, kept open."""

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        """`processes` is asked while pages are missing."""
        self._processes = processes
        self._files: dict[int, int] = {}  # by process

    def read(self, expected: int) -> list[Status]:
        """The ranks that run, of which there are `expected`."""
        found = self._read_open()
        if len(found) < expected:
            for pid in self._processes():
                if pid not in self._files and (files := _files_of(pid, (_PAGE,))):
                    self._files[pid] = os.open(files[-1][0], os.O_RDONLY | os.O_CLOEXEC)
            found = self._read_open()
        return sorted(found, key=lambda status: status.rank)

    def _read_open(self) -> list[Status]:
        found = []
        for pid, file in list(self._files.items()):
            status = _whole(file)
            if status is None or status.state == "left" or not Path(f"/proc/{pid}").exists():
                os.close(self._files.pop(pid))
            else:
                found.append(_alive(status, pid))
        return found


class Elsewhere:
    """A file in memory, in which a launcher shows the ranks of other hosts. A new one takes the
    place of the last one under its number: who reads gets either as a whole."""

    def __init__(self) -> None:
        self._file = -1

    def show(self, statuses: Iterable[Status]) -> None:
        text = json.dumps([status._asdict() for status in statuses]).encode()
        try:
            new = os.memfd_create(_ELSEWHERE, os.MFD_CLOEXEC)
        except OSError:  # no descriptor is left, or no such call
            return
        os.write(new, text)
        if self._file < 0:
            self._file = new
        else:
            os.dup2(new, self._file, inheritable=False)
            os.close(new)


def from_fields(fields: dict[str, Any]) -> Status:
    """From _asdict() of another host. Raises TypeError or ValueError for anything else."""
    made = Status(**fields)
    for name, kind in get_type_hints(Status).items():
        value = getattr(made, name)
        if get_origin(kind) is list:
            fits = isinstance(value, list) and all(type(item) is int for item in value)
        else:
            fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            raise ValueError(f"{name} is {value!r:.40}")
    return made


def _files_of(pid: int, names: tuple[str, ...] = (_PAGE, _ELSEWHERE)) -> list[tuple[str, str]]:
    """(path, name) of its files of these names, the newest last; none of another user."""
    folder = f"/proc/{pid}/fd"
    found = []
    with suppress(OSError):  # it has ended, or is another user's
        for number in sorted(map(int, os.listdir(folder))):  # noqa: PTH208 - hundreds, often
            with suppress(OSError):
                target = os.readlink(f"{folder}/{number}")  # noqa: PTH115
                name = target.removeprefix("/memfd:").removesuffix(" (deleted)")
                if target.startswith("/memfd:") and name in names:
                    found.append((f"{folder}/{number}", name))
    return found


def _read(path: str, name: str) -> list[Status]:
    """Empty for a page that a child process has inherited, or whose world is over."""
    pid = int(path.split("/")[2])
    with suppress(OSError, ValueError, TypeError, KeyError, struct.error):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if name == _ELSEWHERE:
                rows = _json.read(os.pread(file, _LARGEST, 0))
                return [from_fields(row) for row in rows]
            status = _whole(file)
        finally:
            os.close(file)
        if status is not None and status.state != "left" and status.pid in _numbers_of(pid):
            return [_alive(status, pid)]
    return []


def _whole(file: int) -> Status | None:
    """None where it cannot be read, or its writer was killed in the middle of a record."""
    with suppress(OSError, ValueError, KeyError, struct.error):
        for _ in range(_TRIES):
            first, page = os.pread(file, _LARGEST, 0), os.pread(file, _LARGEST, 0)
            if _versions(first) == _versions(page):
                return status_of(page)
    return None


def _versions(page: bytes) -> object:
    found = parse(page) or {}
    versions = [value for name, value in found.items() if name.endswith(".version")]
    return object() if any(version % 2 for version in versions) else versions


def _alive(status: Status, pid: int) -> Status:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
        status = status._replace(processor=_processor(pid))
        if state in "Tt" and status.state == "running":
            return status._replace(state="stopped")
    return status


def _processor(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _numbers_of(pid: int) -> list[int]:
    """A process's numbers, also the one that it has in a container of its own."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return [int(word) for word in line.split()[1:]]
    return [pid]


def _text(field: bytes) -> str:
    text = field.partition(b"\0")[0].decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)

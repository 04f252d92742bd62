"""Finds the descendants of this process, and signals exactly those.

A process is only ever signalled if it descends from us, and through a descriptor that is opened
before its identity (number and start time) is checked: a recycled number is never hit.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Loaded here and not between fork and exec.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Process(NamedTuple):
    pid: int
    parent: int
    group: int
    start: int  # clock ticks after boot; with the number it is an identity
    dead: bool  # a zombie
    name: str


def adopt_orphans(adopt: bool = True) -> None:
    """Orphaned descendants become our children instead of init's."""
    if _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(parent: int) -> None:
    """Called between fork and exec: the kernel kills us when `parent` ends, even if it just did."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def read_process(pid: int) -> Process | None:
    """A process as the kernel describes it; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name stands in parentheses and may contain anything, also parentheses.
    name = text[text.index(b"(") + 1 : text.rindex(b")")].decode(errors="replace")
    fields = text[text.rindex(b")") + 2 :].split()
    dead = fields[0] in (b"Z", b"X")
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[19]), dead, name)


def descendants(root: int) -> list[Process]:
    """All processes below `root`, zombies included, parents before children."""
    children: dict[int, list[Process]] = {}
    with suppress(FileNotFoundError):
        for entry in os.listdir("/proc"):  # noqa: PTH208 - hundreds of entries, in the exit path
            process = read_process(int(entry)) if entry.isdigit() else None
            if process is not None:
                children.setdefault(process.parent, []).append(process)
    found = list(children.get(root, ()))
    for process in found:  # grows while it is walked
        found.extend(children.get(process.pid, ()))
    return found


# A shell runs its trap when the program that it waits for has ended, so that one needs the signal.
_SHELLS = ("sh", "ash", "bash", "dash", "ksh", "zsh")


def answers(process: Process, number: signal.Signals) -> bool:
    """Whether a process handles or ignores a signal by itself, and no shell's trap does."""
    if process.name in _SHELLS:
        return False
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith(("SigCgt:", "SigIgn:")) and int(line[7:], 16) >> (number - 1) & 1:
                return True
    return False


def addressees(leader: int, number: signal.Signals) -> list[Process]:
    """The processes of the group that `leader` leads that a signal is for, parents before their
    children. Not those below a process that answers it: a program that saves its state on
    SIGTERM needs its workers (a DataLoader's, say), which have no handler, and ends them itself."""
    below: dict[int, bool] = {}  # by process of the leader's: whether its children are left out
    found = []
    for process in descendants(os.getpid()):
        ours = process.pid == leader or process.parent in below
        left_out = ours and process.pid != leader and below[process.parent]
        if ours:
            below[process.pid] = left_out or answers(process, number)
        if process.group == leader and not left_out:
            found.append(process)
    return found


def send(process: Process, number: signal.Signals) -> None:
    """Signals this very process, or nobody."""
    with suppress(OSError):  # it ended, or belongs to somebody else now (setuid)
        descriptor = os.pidfd_open(process.pid)
        try:
            now = read_process(process.pid)
            if now is not None and now.start == process.start:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def reap(processes: Iterable[Process]) -> None:
    """Collects those zombies among `processes` that are our children."""
    me = os.getpid()
    for process in processes:
        if process.dead and process.parent == me:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def describe(processes: Iterable[Process]) -> str:
    """'pid 812 (python), pid 813 (python)'."""
    return ", ".join(f"pid {process.pid} ({process.name})" for process in processes)


def oom_kills() -> int:
    """How often the kernel killed in our control group for want of memory; 0 where unknown."""
    with suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().partition("0::/")[2].splitlines()[:1]
        events = Path("/sys/fs/cgroup", *group, "memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])
    return 0

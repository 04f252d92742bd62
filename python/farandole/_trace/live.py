"""A timeline's file while ranks record: events come to it as they happen.

One rank of a host writes, whichever has the lock; the others wait for it in the kernel. It reads
what the ranks of its host record into, and so has also the last events of a rank that dies. If it
stops before others, one of them begins the file anew from what there is.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from farandole._core import ResourceError, TraceFollower
from farandole._trace.merging import announce
from farandole._trace.parts import TraceError
from farandole._trace.salvage import events_files

PERIOD = 0.05  # seconds, so that an event is in the file within 0.1
END = b"\n]}\n"  # of every file: it is valid at any time


class Live:
    """This rank's share in the writing, until `end`."""

    def __init__(
        self, parts: Path, file: Path, rank: int, ranks: int, begin_anew: Callable[[], None]
    ) -> None:
        """`begin_anew` makes the file from what the parts hold of ranks that have stopped."""
        self._parts = parts
        self._file = file
        self._own = f".rank-{rank}.events"
        self._begin_anew = begin_anew
        self._ended = threading.Event()
        self._lock = os.open(parts / ".writer", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._turn = threading.Lock()  # guards the decision to write
        self._writes = self._try_lock()
        self._thread = threading.Thread(target=self._run, name="farandole timeline", daemon=True)
        if self._writes:
            announce(file, ranks)
        self._thread.start()

    def end(self) -> None:
        """This rank writes no more. Of those that still record another one begins."""
        with self._turn:
            self._ended.set()
        if self._writes:  # else its thread waits for the lock, gives it up at once, and ends
            self._thread.join()

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _run(self) -> None:
        try:
            with suppress(OSError, ResourceError, TraceError):  # all is written at the end, too
                if self._writes or self._takes_over():
                    self._write()
        finally:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # children may have the descriptor, too
            os.close(self._lock)

    def _takes_over(self) -> bool:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        with self._turn:
            self._writes = not self._ended.is_set()
        if self._writes:
            self._begin_anew()
        return self._writes

    def _write(self) -> None:
        followers: dict[Path, TraceFollower] = {}
        with self._file.open("r+b") as file:
            while not self._ended.wait(PERIOD):
                self._follow_new(followers)
                lines = b"".join(follower.more() for follower in followers.values())
                if lines:
                    _append(file.fileno(), lines)

    def _follow_new(self, followers: dict[Path, TraceFollower]) -> None:
        new = [path for path in events_files(self._parts) if path not in followers]
        for path in sorted(new, key=lambda path: path.name != self._own):
            with suppress(ResourceError):  # not whole yet, or gone
                follower = TraceFollower(str(path))
                if path.name == self._own or self._is_here(follower, followers):
                    followers[path] = follower

    def _is_here(self, follower: TraceFollower, followers: dict[Path, TraceFollower]) -> bool:
        """Hosts may share the folder, but not the memory of the files."""
        own = followers.get(self._parts / self._own)
        return own is not None and own.host == follower.host


def _append(file: int, lines: bytes) -> None:
    """Over the end of the file, by one write, which has the end again."""
    at = os.fstat(file).st_size - len(END)
    first = os.pread(file, 2, at - 2) == b"[\n"
    events = lines.rstrip(b"\n").replace(b"\n", b",\n")
    os.pwrite(file, (b"" if first else b",\n") + events + END, at)

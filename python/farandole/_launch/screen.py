"""A file that lines of many streams are printed to.

It never blocks: what cannot be written now waits in a bounded queue, and while that is full the
ranks' pipes are not read, so a slow reader slows the ranks down and not the launcher. One line may
be *open*: the stream it is of may go on with it, and anybody else first ends it; where it is a bar
on a terminal, others write above it.
"""

from __future__ import annotations

import errno
import os
import select
import stat

_QUEUE_LIMIT = 256 * 1024
_ATOMIC = 4096  # PIPE_BUF: this much never blocks a pipe that polls writable

ERASE = b"\r\x1b[K"  # the line the cursor is in


class Screen:
    """One file that lines of many streams go to."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_terminal = os.isatty(fd)
        self.open_by: object | None = None
        self._bar = b""  # the open line, where it can be taken away and drawn again
        self.gone = False  # the reader left
        self.trouble = ""  # why a file takes nothing more; taken by who reports it
        self._queue = bytearray()
        self._chunk = 1 << 20 if stat.S_ISREG(os.fstat(fd).st_mode) else _ATOMIC

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    @property
    def full(self) -> bool:
        return len(self._queue) > _QUEUE_LIMIT

    def put(self, data: bytes) -> None:
        if not self.gone:
            self._queue += data

    def say(self, line: str) -> None:
        """A line of our own."""
        self.put_above(line.encode(errors="replace") + b"\n")

    def put_above(self, lines: bytes) -> None:
        """Whole lines: above the bar that is open, else below the line that is."""
        if not self._bar:
            self.end_line()
        self.put((ERASE if self._bar else b"") + lines + self._bar)

    def put_open(self, again: bytes, line: bytes, by: object, *, is_bar: bool) -> None:
        """A line that has not ended, behind what leads to its beginning."""
        self.put(again + line)
        self.open_by = by
        self._bar = line if is_bar and self.is_terminal else b""

    def end_line(self) -> None:
        if self.open_by is not None:
            self.put(b"\n")
            self.line_has_ended()

    def line_has_ended(self) -> None:
        self.open_by, self._bar = None, b""

    def columns(self) -> int:
        """How many letters a bar may have before the terminal wraps it."""
        try:
            return (os.get_terminal_size(self.fd).columns or 80) - 1
        except OSError:
            return 79

    def flush(self, turns: int = 64) -> None:
        """Writes what fits without waiting."""
        writable = select.poll()
        writable.register(self.fd, select.POLLOUT)
        while self._queue and turns > 0 and writable.poll(0):
            turns -= 1
            try:
                written = os.write(self.fd, memoryview(self._queue)[: self._chunk].tobytes())
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE and not self.is_terminal:  # these have left
                    self.trouble = os.strerror(error.errno or errno.EIO)
                self.gone = True
                self._queue.clear()
                return
            del self._queue[:written]

    def drop(self) -> None:
        self._queue.clear()


def open_screens() -> tuple[Screen, Screen]:
    """Ours for stdout and stderr: one and the same where they are the same file."""
    out = Screen(1)
    same = os.path.sameopenfile(1, 2)
    return out, out if same else Screen(2)

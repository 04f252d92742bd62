"""Whole lines of many streams on one screen.

A `Screen` is a file we print to. It never blocks: what cannot be written now waits in a bounded
queue, and while that is full the ranks' pipes are not read, so a slow reader slows the ranks down
and not the launcher. A `Stream` is one rank's stdout or stderr. It hands over whole lines; a part
of a line is shown only when nothing came for a while, when it is redrawn with a carriage return (a
progress bar), or when it is so long that keeping it would cost memory. Such a line stays *open*:
its stream may go on with it, and anybody else first ends it.
"""

from __future__ import annotations

import errno
import os
import select
import stat

_QUEUE_LIMIT = 256 * 1024
_LINE_LIMIT = 64 * 1024
_READ_SIZE = 64 * 1024
_ATOMIC = 4096  # PIPE_BUF: this much never blocks a pipe that polls writable

_SILENCE = 1.0  # longer than a busy machine keeps a rank from finishing its line
_REDRAW_TERMINAL = 0.2
_REDRAW_FILE = 5.0  # a log file wants to know that a bar moves, not every state of it


class Screen:
    """One file that lines of many streams go to."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_terminal = os.isatty(fd)
        self.open_by: Stream | None = None
        self.gone = False  # the reader left
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
        self.end_line()
        self.put(line.encode(errors="replace") + b"\n")

    def end_line(self) -> None:
        if self.open_by is not None:
            self.put(b"\n")
            self.open_by = None

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
            except OSError:  # EPIPE: the reader left; EIO: the terminal did; ENOSPC
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


class Stream:
    """One rank's stdout or stderr on its way to a screen and, if wished, a file."""

    def __init__(self, fd: int, prefix: bytes, screen: Screen, copy: int | None = None) -> None:
        self.fd = fd
        self.at_end = False
        self.trouble = ""  # why the copy stopped; taken by who reports it
        self._prefix = prefix
        self._screen = screen
        self._copy = copy
        self._part = bytearray()  # of a line that has not ended yet
        self._since = 0.0  # when the part began, or was last shown
        self._last = 0.0  # when anything came last

    @property
    def readable(self) -> bool:
        """Whether more should be read now."""
        return not self.at_end and not self._screen.full

    @property
    def unwanted(self) -> bool:
        """Nobody is left who would take it; closing the pipe tells the rank, as in a shell."""
        return self._screen.gone and self._copy is None

    def read(self, now: float) -> bool:
        """Takes what is there; only after poll said so. False at the end."""
        data = os.read(self.fd, _READ_SIZE)
        if not data:
            self.close()
            return False
        if self._copy is not None:
            self._write_copy(data)
        self.feed(data, now)
        return True

    def feed(self, data: bytes, now: float) -> None:
        """Adds what a rank wrote; whole lines go to the screen at once."""
        if not self._part:
            self._since = now
        self._last = now
        self._part += data
        end = self._part.rfind(b"\n") + 1
        if end:
            self._show(bytes(self._part[:end]))
            del self._part[:end]
            self._since = now
        if len(self._part) > _LINE_LIMIT:
            self._show(bytes(self._part))
            self._part.clear()

    def due(self) -> float | None:
        """When the part of a line should be shown; None while there is none."""
        if not self._part.strip(b"\r"):
            return None
        silence = self._last + _SILENCE
        if b"\r" not in self._part:
            return silence
        pace = _REDRAW_TERMINAL if self._screen.is_terminal else _REDRAW_FILE
        return min(silence, self._since + pace)

    def show_part(self, now: float) -> None:
        """Shows an unfinished line, which stays open."""
        if not self._part:
            return
        ends_redraw = bool(self._prefix) and self._part.endswith(b"\r")
        self._show(bytes(self._part))
        # Kept, so that what follows is known to replace this and not to continue it.
        self._part[:] = b"\r" if ends_redraw else b""
        self._since = now

    def close(self) -> None:
        """At the end of the stream, or when nobody wants it any more."""
        if self.at_end:
            return
        self.show_part(self._last)
        if self._prefix and self._screen.open_by is self:
            self._screen.end_line()
        self.at_end = True
        os.close(self.fd)
        if self._copy is not None:
            os.close(self._copy)
            self._copy = None

    def _show(self, text: bytes) -> None:
        """Puts lines, the last of which may be unfinished, on the screen."""
        screen = self._screen
        goes_on = screen.open_by is self
        if not goes_on:
            screen.end_line()
        ended = text.endswith(b"\n")
        lines = text.split(b"\n")
        if ended:
            lines.pop()
        if self._prefix:
            first = self._redrawn(lines[0], goes_on)
            rest = [self._prefix + _newest(line) for line in lines[1:]]
            text = b"\n".join([first, *rest]) + (b"\n" if ended else b"")
        screen.put(text)
        screen.open_by = None if ended else self

    def _redrawn(self, line: bytes, goes_on: bool) -> bytes:
        if not goes_on:
            return self._prefix + _newest(line)
        if b"\r" not in line.rstrip(b"\r"):
            return line.rstrip(b"\r")
        again = b"\r\x1b[K" if self._screen.is_terminal else b"\n"
        return again + self._prefix + _newest(line)

    def _write_copy(self, data: bytes) -> None:
        assert self._copy is not None
        try:
            while data:
                data = data[os.write(self._copy, data) :]
        except OSError as error:
            self.trouble = os.strerror(error.errno or errno.EIO)
            os.close(self._copy)
            self._copy = None


def _newest(line: bytes) -> bytes:
    """What a terminal would show of a line that was redrawn with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]

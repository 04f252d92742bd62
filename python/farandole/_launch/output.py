"""Whole lines of many streams on one screen.

A `Stream` is one rank's stdout or stderr. It hands whole lines to its `Screen`; a part of a line is
shown only when nothing came for a while, when it is redrawn (a progress bar), or when it is so long
that keeping it would cost memory. A *quiet* stream keeps its bars to itself.
"""

from __future__ import annotations

import errno
import os

from farandole._launch.bars import (
    fitted,
    is_bar,
    is_drawing,
    is_redrawn,
    last_state,
    newest,
    since_cleared,
)
from farandole._launch.screen import ERASE, Screen

_LINE_LIMIT = 64 * 1024
_READ_SIZE = 64 * 1024

_SILENCE = 1.0  # longer than a busy machine keeps a rank from finishing its line
_REDRAW_TERMINAL = 0.2
_REDRAW_FILE = 5.0  # a log file wants to know that a bar moves, not every state of it


class Stream:
    """One rank's stdout or stderr on its way to a screen and, if wished, a file.

    `quiet`: its bars are not shown, unless `show_hidden_bar` asks for them; may be changed.
    """

    def __init__(
        self,
        fd: int,
        prefix: bytes,
        screen: Screen,
        copy: int | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self.fd = fd
        self.at_end = False
        self.trouble = ""  # why the copy stopped; taken by who reports it
        self._prefix = prefix
        self._screen = screen
        self._copy = copy
        self.quiet = quiet and bool(prefix)
        self._hidden = b""  # the last state of a bar that was not shown
        self._part = bytearray()  # of a line that has not ended yet
        self._drawn = b""  # what was shown of that line, where backspaces may go back into it
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
        if self.quiet and is_redrawn(self._part):
            self._part[:] = self._shortened(bytes(self._part))
        if len(self._part) > _LINE_LIMIT:
            self._show(bytes(self._part))
            self._part.clear()

    def due(self) -> float | None:
        """When the part of a line should be shown; None while there is none."""
        if not self._part.strip(b"\r"):
            return None
        silence = self._last + _SILENCE
        if not is_drawing(self._part):
            return silence
        if self.quiet:
            return None
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

    def show_hidden_bar(self) -> None:
        """The last state of the bar that was kept quiet: how far its rank came."""
        if self._hidden.strip():
            self._screen.put_above(self._prefix + self._hidden + b"\n")
            self._hidden = b""

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
        if not self._prefix:
            self._pass_on(text, goes_on)
            return
        *lines, rest = (self._without_bars(text) if self.quiet else text).split(b"\n")
        if lines and goes_on:
            self._end_line(lines.pop(0))
            goes_on = False
        if lines:
            screen.put_above(b"".join(self._prefix + newest(line) + b"\n" for line in lines))
        if rest:
            self._open_line(rest, goes_on)

    def _pass_on(self, text: bytes, goes_on: bool) -> None:
        if not goes_on:
            self._screen.end_line()
        self._screen.put(text)
        self._screen.open_by = None if text.endswith(b"\n") else self

    def _end_line(self, line: bytes) -> None:
        """The rest of the line that this stream has opened."""
        screen = self._screen
        if self._is_drawn_again(line):
            screen.put(self._again() + self._prefix + newest(self._drawn + line))
        else:
            screen.put(line.rstrip(b"\r"))
        self._drawn = b""
        screen.end_line()

    def _open_line(self, rest: bytes, goes_on: bool) -> None:
        """A line that has not ended, or what it goes on with."""
        screen = self._screen
        if not goes_on:
            screen.end_line()
            self._drawn = b""
        elif not self._is_drawn_again(rest):
            self._drawn += rest if self._drawn else b""
            screen.put(rest.rstrip(b"\r"))
            return
        whole = self._drawn + rest
        is_bar = is_drawing(whole) or bool(self._drawn)
        line = self._prefix + newest(whole)
        if is_bar:
            self._drawn = last_state(whole)
            line = fitted(line, screen.columns()) if screen.is_terminal else line
        screen.put_open(self._again() if goes_on else b"", line, self, is_bar=is_bar)

    def _is_drawn_again(self, more: bytes) -> bool:
        """Also where a bar only goes on, on a terminal: it may have been too long to be whole."""
        cut = bool(self._drawn) and self._screen.is_terminal
        return is_redrawn(more) or cut or self._drawn.endswith(b"\b")

    def _again(self) -> bytes:
        return ERASE if self._screen.is_terminal else b"\n"

    def _without_bars(self, text: bytes) -> bytes:
        """The lines that are none; the last state of a bar is kept."""
        *lines, rest = text.split(b"\n")
        kept = b""
        for line in lines:
            left = since_cleared(line)
            if is_bar(left):
                self._hidden = newest(left)
            elif left or not line:
                kept += left + b"\n"
        rest = since_cleared(rest)
        if is_redrawn(rest):
            self._hidden, rest = newest(rest), b""
        return kept + rest

    def _shortened(self, part: bytes) -> bytes:
        """A bar that nobody sees needs no more than its last state."""
        part = since_cleared(part)
        return part[max(0, part.rstrip(b"\r").rfind(b"\r")) :]

    def _write_copy(self, data: bytes) -> None:
        assert self._copy is not None
        try:
            while data:
                data = data[os.write(self._copy, data) :]
        except OSError as error:
            self.trouble = os.strerror(error.errno or errno.EIO)
            os.close(self._copy)
            self._copy = None
